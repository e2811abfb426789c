"""What the first call of a model shows of the calls of its layers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from workbench.core import layer_extents
from workbench.core.layer_extents import ObservedCalls
from workbench.core.model_costs import Extent


class Given:
    """An input, of which only its identity counts."""


def test_inputs_that_are_the_same_have_one_number_and_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted, not timed: lists of experts may be thousands of calls."""
    looked = []

    class Counted(weakref.ref[Any]):
        def __call__(self) -> Any:
            looked.append(1)
            return super().__call__()

    monkeypatch.setattr(layer_extents, "ref", Counted)
    calls, inputs = ObservedCalls(), [Given() for _ in range(100)]
    calls.begin()
    for given in [*inputs, *inputs]:
        calls.add_input("fc", Extent((4,)), 4, given)
    calls.end(has_returned=True)
    numbers = [extent.source for _, extent in calls.found]
    assert numbers[:100] == numbers[100:] and len(set(numbers)) == 100
    assert len(looked) <= 200
