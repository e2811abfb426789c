"""How far a run is from one device."""

import math

import pytest

from workbench.core.metrics import difference
from workbench.core.verdict import TOLERANCES

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "truth", "expected"),
    [(0.5, 0.25, 0.25), (-0.5, 0.25, 0.75), (404.0, 400.0, 0.01), (-404.0, -400.0, 0.01), (400.0, 0.0, 400.0),
     (NAN, NAN, 0.0), (math.inf, math.inf, 0.0), (NAN, 1.0, math.inf), (1.0, NAN, math.inf), (1.0, math.inf, math.inf),
     (math.inf, 1.0, math.inf), (-math.inf, math.inf, math.inf)],
)  # fmt: skip
def test_differences_are_relative_beyond_one(value, truth, expected):
    assert difference(value, truth) == pytest.approx(expected)


def test_large_losses_may_round_and_no_more():
    rounded = 347.25 * (1 + 2**-20)
    tolerance = TOLERANCES["fp32"].loss
    assert abs(rounded - 347.25) > tolerance > difference(rounded, 347.25)
    assert difference(347.26, 347.25) > tolerance
