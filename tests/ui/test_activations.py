"""Activations of any shape in the panel: who holds what, and bytes that a step on the real runtime sends, too."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.ui.odd_activations import (
    LENGTH,
    MODELS,
    WIDTH,
    Attention,
    Flat,
    OwnPositions,
    Positions,
    Recurrent,
    Twice,
    Words,
    batches,
)
from workbench.core.layer_plan import LayerEdge, LayerPlan
from workbench.core.model_costs import Extent, ModelCosts
from workbench.testing import run_ranks
from workbench.training.costs.dry_run import dry_run
from workbench.training.runs.job import Job
from workbench.training.runs.train import run_one_device, run_strategy
from workbench.ui.grid.view import boxings_of
from workbench.ui.panel import Panel
from workbench.ui.planning import offline_trainer
from workbench.units import format_bytes

BATCH = 16


@functools.cache
def costs_of(model: type[Words]) -> ModelCosts:
    return offline_trainer.costs_of(model, batches(), cross_entropy)


def panel_of(model: type[Words], strategy: str, num_ranks: int = 2) -> Panel:
    return Panel(
        model, batches(), cross_entropy, strategy=strategy, num_ranks=num_ranks, costs=costs_of(model),
        batch_size=BATCH, hardware="v100-dgx1", keep=False,
    )  # fmt: skip


def select(panel: Panel, pattern: str) -> None:
    panel._editor.grid._handle_custom_msg({"event": "select", "rows": [pattern]}, [])


@pytest.mark.sampled(24)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", ["data", "model", "*: model | sequence", "hybrid"])
def test_every_row_is_shown_whatever_shapes_its_activations_have(model: type[Words], strategy: str):
    panel = panel_of(model, "data")
    panel.load(strategy)
    select(panel, "tensor")
    panel._editor.grid._handle_custom_msg({"event": "tensor"}, [])
    for layer in panel.state.layers:
        select(panel, layer.name)
    assert [row["pattern"] for row in panel._editor.grid.view["rows"]] == [row.node.pattern for row in panel.state.rows]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("model", [model for model in MODELS if model not in (Twice, Flat)])
@pytest.mark.parametrize(("strategy", "num_ranks"), [("data", 2), ("model", 2), ("*: model | 1x2x2", 4)])
def test_the_panel_and_the_planner_count_what_a_step_sends(model: type[Words], strategy: str, num_ranks: int):
    panel = panel_of(model, strategy, num_ranks)
    words, targets = (part[:BATCH] for part in batches())
    sent = sum(dry_run(model, str(panel.strategy), num_ranks, words, targets, cross_entropy).sent_bytes)
    assert panel._editor.grid.view["total"][0] == f"about {format_bytes(sent)}"
    estimate = panel.estimate()
    assert estimate is not None and estimate.boxed_bytes == pytest.approx(sent)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: model | sequence"])
@pytest.mark.parametrize("model", MODELS)
def test_a_run_has_the_numbers_of_one_device(model: type[Words], strategy: str):
    job = Job(model, batches(), cross_entropy, None, BATCH, 3)
    losses = run_one_device(job).losses
    for result in run_ranks(lambda: run_strategy(job, strategy), 2):
        assert result.losses == pytest.approx(losses, abs=2e-6)


def planned(model: type[Words], strategy: str, layer: str) -> tuple[LayerPlan, LayerEdge]:
    """The plan of a layer, and the boxings before it."""
    panel = panel_of(model, strategy)
    index = [each.name for each in panel.state.layers].index(layer)
    boxings = boxings_of(panel.state, panel._editor._facts_now())
    return boxings.layers[index], boxings.layer_edges[index]


def test_positions_lie_on_all_ranks_and_join_the_way_of_the_samples():
    (pos, _), (norm, edge) = (planned(Positions, "*: data | 1x2x1", name) for name in ("pos", "block.ln"))
    assert str(pos.input_layout.sbp) == str(pos.output_layout.sbp) == "(B,)"
    assert norm.input_shape == (BATCH, LENGTH, WIDTH) and str(norm.input_layout.sbp) == "(S(0),)" and not edge.plans
    _, split = planned(Positions, "*: model", "block.ln")
    assert [(plan.kind, tuple(plan.shape)) for plan in split.plans] == [("all-gather", (LENGTH, WIDTH))]


def test_samples_in_the_second_dim_are_split_there():
    (rnn, _), (head, edge) = (planned(Recurrent, "*: data | 1x2x1", name) for name in ("rnn", "head"))
    assert rnn.input_shape == (LENGTH, BATCH, WIDTH) and str(rnn.input_layout.sbp) == "(S(1),)"
    assert head.input_shape == (BATCH, LENGTH, WIDTH) and not edge.plans


def extents(model: type[Words]) -> dict[str, tuple[Extent | None, Extent | None]]:
    rows = costs_of(model).rows
    return {row.layer.name: (row.input_extent, row.output) for row in rows}


def test_sizes_are_those_of_the_trace():
    sample, alike, second = Extent((LENGTH, WIDTH)), Extent((LENGTH, WIDTH), None), Extent((LENGTH, WIDTH), 1)
    assert extents(Positions)["pos"] == (Extent((LENGTH,), None), alike)
    assert extents(Recurrent)["rnn"] == (second, None)
    assert extents(Attention)["attention"] == (second, second)
    assert extents(Attention)["attention.out_proj"] == (None, second)  # called by a function; gives what attention does
    assert extents(Flat)["block.ln"] == (sample, sample)
    assert extents(OwnPositions)["(root)"] == (None, sample)  # what it adds on the way


def test_exchanges_of_a_batch_in_the_second_dim_are_those_of_one_in_the_first():
    """The input hook leaves samples where they are: only gradients are exchanged."""
    words, targets = (part[:BATCH] for part in batches())
    sent = dry_run(Attention, "*: data | 1x2x1", 2, words, targets, cross_entropy)
    gradients = sum(parameter.numel() for parameter in Attention().parameters()) * 4 * 2
    assert sum(sent.sent_bytes) == gradients


def test_a_panel_that_only_predicts_makes_batches_of_samples_too():
    samples = [(torch.arange(3 + index), torch.tensor(index)) for index in range(4)]
    words = lambda: nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(32, 4))  # noqa: E731

    def padded(some):
        ids, classes = zip(*some, strict=True)
        return nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.stack(classes)

    costs = offline_trainer.costs_of(words, samples, cross_entropy, padded)
    assert costs.sample_shape == (4,) and [row.output.sizes for row in costs.rows] == [(4, 8), (4,)]
    assert offline_trainer.OfflineTrainer(costs, 2, samples, cross_entropy, padded).sample_shape == (4,)
