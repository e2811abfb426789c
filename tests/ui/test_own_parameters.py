"""Rows of blocks that own parameters beside their layers: of the block, and of its own parameters alone."""

from __future__ import annotations

import random

import pytest

from tests.ui.models import linear
from workbench.core.layer_extents import LayerExtents
from workbench.core.rows import Layer, Row
from workbench.ui.grid.view import Facts, grid_view
from workbench.ui.planning.predictor import Predictor
from workbench.ui.strategy.grouping import walk
from workbench.ui.strategy.state import PanelState
from workbench.ui.strategy_editor import StrategyEditor


def scaled(num_blocks: int) -> list[Layer]:
    """Blocks with a scale of their own and two layers, and a head."""
    layers = []
    for number in range(num_blocks):
        own = Layer(f"blocks.{number}", "Scaled", {"scale": (8, 8)}, 64)
        layers += [own, linear(f"blocks.{number}.fc", 8, 8), linear(f"blocks.{number}.out", 8, 8)]
    return [*layers, linear("head", 8, 8)]


def of_rows(state: PanelState) -> dict[str, tuple[int, ...]]:
    return {row.node.identity: row.node.layers for row in state.rows}


def test_a_choice_at_a_block_is_for_all_its_layers():
    state = PanelState(scaled(2), 2, "*: data; blocks.1: model")
    assert of_rows(state) == {"blocks.0": (0, 1, 2), "blocks.1": (3, 4, 5), "head": (6,)}
    state.set_choice(["blocks.1"], "data")
    assert state.text == "*: data"


def test_own_parameters_have_a_row_in_their_block():
    state = PanelState(scaled(4), 2)
    state.fold("blocks.[0-3]")
    assert [row.node.label for row in state.rows] == ["blocks.0-3 \u00d74", "(own)", "fc", "out", "head"]
    own = state.rows[1].node
    assert own.layers == (0, 3, 6, 9) and own.identity != state.rows[0].node.identity
    assert all(Row(own.pattern).matches(state.layers[index].name) for index in own.layers)
    names = [row["pattern"] for row in grid_view(state, Facts(8, [LayerExtents()] * 13))["rows"]]
    assert len(set(names)) == 5
    state.set_choice([own.identity], "model")
    assert [choice.parallel for choice in state.choices] == ["model", "data", "data"] * 4 + ["data"]
    state.set_choice([own.identity, "blocks.[0-3]"], "model")
    assert [choice.parallel for choice in state.choices] == ["model"] * 12 + ["data"]


def test_a_search_finds_own_parameters_alone():
    state = PanelState(scaled(2), 2)
    state.look_for("blocks.1")
    own = state.rows[0].node
    assert own.label == "blocks.1 (own)" and own.layers == (3,)
    state.set_choice([own.identity], "model")
    assert [choice.parallel for choice in state.choices] == ["data"] * 3 + ["model", "data", "data", "data"]


def test_the_planner_prices_no_layers_below_own_parameters(monkeypatch: pytest.MonkeyPatch):
    layers = [Layer("stem", "Scaled", {"scale": (8, 8)}, 64), linear("stem.fc", 8, 8), *scaled(4)]
    facts = Facts(8, [LayerExtents()] * len(layers))
    part = StrategyEditor(layers, 2, None, facts, Predictor(None, 8), title="", on_run=lambda: None)
    asked: list[str] = []
    monkeypatch.setattr(part.planner, "html", lambda strategy, num_ranks, layer: asked.append(layer) or "")
    part._on_event({"event": "fold", "rows": ["blocks.[0-3]"]})
    shown = {row.node.label: row.node for row in part.state.rows}
    for label in ("stem", "stem.fc", "(own)", "fc", "head"):
        part._on_event({"event": "select", "rows": [shown[label].identity]})
    assert asked == ["", "stem.fc", "", "blocks.[0-3].fc", "head"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_every_row_reaches_its_layers(seed: int):
    rng = random.Random(seed)
    state = PanelState(scaled(rng.choice([1, 2, 5])), 2)
    for _ in range(12):
        nodes = list(walk(state.nodes))
        assert len({node.identity for node in nodes}) == len(nodes)
        wanted = [choice.parallel for choice in state.choices]
        node, parallel = rng.choice(nodes), rng.choice(["data", "model"])
        for index in node.layers:
            wanted[index] = parallel
        state.set_choice([node.identity], parallel)
        assert [choice.parallel for choice in state.choices] == wanted and state.can_run, state.mistakes
