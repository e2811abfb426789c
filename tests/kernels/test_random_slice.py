"""Random slices: bits of the reference for uniform, Bernoulli and integers; slices equal those of the full tensor."""

import math

import pytest
import torch

from workbench.kernels.random_slice import (
    dropout_slice,
    dropout_slice_reference,
    fill_random,
    fill_random_reference,
)
from workbench.tensors.random import place_of

SHAPE = (3, 5, 4, 7)
STRIDES = [140, 28, 7, 1]
KEYS = [1, 5, 2**63 - 7]
PARAMETERS = {"uniform": (-1.0, 3.0), "normal": (2.0, 0.5), "bernoulli": (0.3, 0.0), "integers": (-5.0, 1000.0)}


def filled(kind, dtype, key, region, device, fill=fill_random):
    out = torch.empty([stop - start for start, stop in region], dtype=dtype, device=device)
    first = sum(start * stride for (start, _), stride in zip(region, STRIDES, strict=True))
    fill(out, kind, key, first, STRIDES, *PARAMETERS[kind])
    return out


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["uniform", "bernoulli", "normal"])
def test_floats_are_those_of_the_reference(kind, dtype, key, device):
    region = ((0, 3), (1, 4), (2, 4), (0, 7))
    found = filled(kind, dtype, key, region, device)
    wanted = filled(kind, dtype, key, region, "cpu", fill_random_reference).to(device)
    if kind == "normal":
        rounding = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)
    elif kind == "uniform" and dtype.itemsize == 2:  # scaled and shifted in 32 bits, then rounded once
        torch.testing.assert_close(found, wanted, rtol=torch.finfo(dtype).eps, atol=0)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16], ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_integers_have_the_bits_of_the_reference(key, dtype, device):
    region = ((1, 3), (0, 5), (0, 2), (3, 6))
    wanted = filled("integers", dtype, key, region, "cpu", fill_random_reference).to(device)
    assert torch.equal(filled("integers", dtype, key, region, device), wanted)


SLICES = {
    "whole": ((3, 5, 4, 7), ((0, 3), (0, 5), (0, 4), (0, 7))),
    "middle": ((3, 5, 4, 7), ((1, 2), (2, 4), (1, 3), (3, 4))),
    "rows": ((6, 16), ((2, 5), (0, 16))),
    "columns between counters": ((6, 16), ((1, 5), (4, 12))),
    "columns within counters": ((6, 16), ((1, 5), (3, 9))),
    "a column": ((6, 16), ((0, 6), (5, 6))),
    "four dims between counters": ((3, 5, 4, 16), ((0, 3), (1, 4), (1, 3), (4, 12))),
    "many programs": ((4, 3000), ((0, 4), (1, 2998))),
    "a program for each row": ((4, 2048), ((1, 3), (8, 2040))),
    "a program for each row, columns within counters": ((3, 2000), ((0, 3), (2, 1999))),
    "a program for each row, rows within counters": ((2, 3, 2001), ((0, 2), (1, 3), (1, 1999))),
    "programs for each row": ((3, 4100), ((1, 3), (1, 4096))),
    "five dims": ((2, 3, 4, 3, 2), ((0, 2), (1, 3), (1, 3), (1, 3), (0, 1))),
    "none": ((6, 16), ((0, 0), (0, 16))),
}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_equals_that_of_the_full_tensor(name, device):
    shape, region = SLICES[name]
    first, strides = place_of(shape, region)
    whole = torch.empty(shape)
    fill_random_reference(whole, "uniform", 9, 0, strides, 0.0, 1.0)
    wanted = whole[tuple(slice(*bounds) for bounds in region)]
    found = torch.empty(wanted.shape, device=device)
    fill_random(found, "uniform", 9, first, strides, 0.0, 1.0)
    assert torch.equal(found.cpu(), wanted)
    dropped = dropout_slice(torch.ones_like(found), 9, first, strides, 0.25)
    assert torch.equal(dropped.cpu() != 0, wanted < 0.75)


def test_positions_beyond_32_bits_are_other_numbers(device):
    near, far = torch.empty(8, device=device), torch.empty(8, device=device)
    fill_random(near, "uniform", 3, 0, [1], 0.0, 1.0)
    fill_random(far, "uniform", 3, 4 * 2**32, [1], 0.0, 1.0)
    wanted = torch.empty(8)
    fill_random_reference(wanted, "uniform", 3, 4 * 2**32, [1], 0.0, 1.0)
    assert not torch.equal(near, far) and torch.equal(far.cpu(), wanted)


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_dropout_scales_kept_elements_and_gradients_the_same(probability, device):
    x = torch.randn(6, 10, device=device, requires_grad=True)
    found = dropout_slice(x, 11, 20, [10, 1], probability)
    wanted = dropout_slice_reference(x.detach().cpu(), 11, 20, [10, 1], probability)
    torch.testing.assert_close(found.cpu(), wanted)
    (grad,) = torch.autograd.grad(found.sum(), x)
    kept = (wanted != 0).float() / (1 - probability if probability < 1 else math.inf)
    torch.testing.assert_close(grad.cpu(), kept)
