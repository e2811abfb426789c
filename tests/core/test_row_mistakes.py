"""Rows that decide for no layer of a model are mistakes, unless others may have taken their layers on purpose."""

from __future__ import annotations

import pytest

from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
from workbench.errors import StrategyError

LAYERS = [
    *(Layer(f"blocks.{n}.{part}", "Linear", {"weight": (8, 8)}) for n in range(4) for part in ("up", "down")),
    Layer("head", "Linear", {"weight": (8, 8)}),
]
EXPERTS = Layer("blocks.0.experts", "Experts", {"up": (4, 8, 8)}, experts=4)


@pytest.mark.parametrize(
    ("text", "row", "later"),
    [
        ("blocks: model; *: data", "blocks: model", "*: data"),
        ("blocks.0.up: model; head: model; blocks: data", "blocks.0.up: model", "blocks: data"),
        ("blocks.*.up: model; blocks.*: data; head: model", "blocks.*.up: model", "blocks.*: data"),
        ("head: data@0; blocks: data@0; *: data@1", "head: data@0", "*: data@1"),
    ],
)
def test_a_row_that_a_later_one_covers_is_a_mistake(text: str, row: str, later: str):
    with pytest.raises(StrategyError) as raised:
        Strategy(text).resolve(LAYERS, 4)
    assert f"row '{row}' decides no layer: '{later}' behind it covers all of its layers" in str(raised.value)
    assert "Fix: put it behind, or leave it out." in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "*: data; blocks: model; head: model",
        "*: model; blocks.*.up: data; blocks.*.down: data; head: data",
        "blocks: model; blocks.[0-3]: data",
        "head: data; *: data",
        "*: data; blocks: model",
        "*: data; blocks.*.up: model; blocks.0: data",  # also for a model of one block
        "head: data; blocks: model; head: model",  # a program may append what it overrides
    ],
)
def test_exceptions_may_take_all_layers_of_a_row(text: str):
    for layers in (LAYERS, [*LAYERS[:2], LAYERS[-1]]):
        assert Strategy(text).resolve(layers, 4).layers


def test_a_row_of_experts_is_an_exception_of_the_row_before():
    assert Strategy("*: data; *: expert:4").resolve([*LAYERS, EXPERTS], 4).layers
    assert Strategy("*: data; *: expert:4").resolve([EXPERTS], 4).layers
    with pytest.raises(StrategyError, match=r"row 'blocks.0.experts: model' decides no layer: '\*: data'"):
        Strategy("blocks.0.experts: model; *: data; *: expert:4").resolve([*LAYERS, EXPERTS], 4)
