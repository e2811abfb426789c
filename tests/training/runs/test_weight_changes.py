"""The distance between two courses of weights, where some are infinite or nan."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from workbench.core.verdict import TOLERANCES, Distance, TensorChange
from workbench.training.runs.exact_dtypes import KeepsFloat64, wide_model
from workbench.training.runs.train import largest_difference
from workbench.training.runs.weight_changes import WeightHistory, changes_apart, perturb, precision_of


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


class Spectrum(nn.Module):
    """Complex weights of some frequencies, as in a Fourier neural operator."""

    def __init__(self, dtype=torch.complex64):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1.0 + 2.0j, dtype=dtype))

    def forward(self, x):
        found = torch.zeros(x.shape[0], x.shape[1] // 2 + 1, dtype=torch.cfloat)
        found[:, :3] = torch.fft.rfft(x)[:, :3] * self.weight
        return torch.fft.irfft(found, n=x.shape[1])


def test_complex_weights_take_part_in_every_comparison():
    assert (precision_of(Spectrum()), precision_of(Spectrum(torch.complex128))) == ("fp32", "float64")
    model, tolerance = Spectrum(), TOLERANCES["fp32"]
    moved = perturb(Spectrum(), tolerance).weight - model.weight
    assert 0 < moved.abs().max() <= 2 * tolerance.unit * model.weight.abs().max()
    states = [{"w": torch.tensor([1.0 + imag * 1j])} for imag in (0.5, 0.75)]
    assert largest_difference(*states) == pytest.approx(0.25 / abs(1 + 0.75j))
    for dtype, unit in ((torch.complex64, 2.0**-23), (torch.complex128, 2.0**-52)):
        start, end = ({"w": torch.tensor([value], dtype=dtype)} for value in (0j, 3 + 4j))
        (change,) = changes_apart(WeightHistory(start, start), WeightHistory(start, end))
        assert (change.apart, change.change, change.rounding) == (5.0, 5.0, 5 * unit)


def test_a_model_in_float64_keeps_imaginary_parts_and_rounds_no_spectrum():
    x = torch.rand(2, 8, dtype=torch.float64)
    with KeepsFloat64():
        found = wide_model(Spectrum())(x)
    expected = torch.fft.rfft(x) * torch.tensor([1 + 2j] * 3 + [0] * 2)
    torch.testing.assert_close(found, torch.fft.irfft(expected, n=8), rtol=1e-14, atol=1e-14)
