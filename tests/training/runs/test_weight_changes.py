"""The distance between two courses of weights, where some are infinite or nan."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.core.verdict import Distance, TensorChange
from workbench.training.runs.weight_changes import WeightHistory, changes_apart


def apart(own: list[float], truth: list[float]) -> TensorChange:
    start = {"w": torch.tensor([1.0, 1.0])}
    histories = [WeightHistory(start, {"w": torch.tensor(end)}, frozenset({"w"})) for end in (own, truth)]
    (change,) = changes_apart(*histories)
    return change


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_elements_that_are_no_numbers_on_both_are_left_out(broken: float):
    change = apart([broken, 3.5], [broken, 3.0])
    assert (change.apart, change.change, change.own_change) == (0.5, 2.0, 2.5)
    assert change.rounding == 3.0 * 2.0**-23
    assert Distance((), (change,)).length() == pytest.approx(0.25)


@pytest.mark.parametrize("other", [math.inf, math.nan, 2.0])
def test_elements_that_are_no_numbers_in_another_way_are_infinitely_apart(other: float):
    assert apart([other, 3.0], [-math.inf, 3.0]).apart == math.inf
