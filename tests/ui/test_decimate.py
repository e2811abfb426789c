"""Decimation keeps order, ends and spikes."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.ui.decimate import decimate


def test_short_curves_are_untouched():
    x, y = decimate(np.arange(1000), np.ones(1000))
    assert len(x) == len(y) == 1000


@pytest.mark.parametrize("num_points", [1001, 1999, 2000, 54321])
def test_long_curves_keep_their_spikes(num_points: int):
    values = np.random.default_rng(0).normal(size=num_points)
    values[num_points // 3], values[num_points // 2] = 50.0, -50.0
    x, y = decimate(np.arange(num_points), values)
    assert len(x) <= 1000
    assert (np.diff(x) >= 0).all()
    assert y.max() == 50.0 and y.min() == -50.0
    assert (values[x] == y).all()


def test_points_without_a_value_are_left_out():
    x, y = decimate(np.arange(3), np.array([1.0, np.nan, 3.0]))
    assert list(x) == [0, 2] and list(y) == [1.0, 3.0]
