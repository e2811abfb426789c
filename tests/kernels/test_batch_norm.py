"""The parts of a global batch norm, put together on one device, against torch's batch norm."""

import pytest
import torch
import torch.nn.functional as F

from workbench.kernels.batch_norm import gradient_sums, input_gradient, normalize, shard_statistics

SHAPES = [(7, 5), (3, 4, 9), (6, 3, 5, 4), (2, 3, 2, 3, 2)]
TOLERANCES = [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize("affine", [False, True])
def test_the_parts_equal_torchs_batch_norm(shape, dtype, atol, rtol, affine):
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, dtype=dtype, generator=generator) * 2 + 1 for _ in range(2))
    weight, bias = (torch.randn(shape[1], dtype=dtype, generator=generator).requires_grad_() for _ in range(2))
    given = (weight, bias) if affine else (None, None)
    x.requires_grad_()
    expected = F.batch_norm(x, None, None, *given, training=True)
    expected.backward(dy)

    with torch.no_grad():
        mean, variance = shard_statistics(x)
        y = normalize(x, mean, variance, *given, 1e-5)
        invstd = torch.rsqrt(variance + 1e-5)
        sums = gradient_sums(dy, x, mean, invstd)
        dx = input_gradient(dy, x, mean, variance, invstd, given[0], 1e-5, sums, x.numel() // shape[1])
    pairs = [(y, expected), (dx, x.grad)]
    if affine:
        pairs += [(sums[0], bias.grad), (sums[1], weight.grad)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (0, 3)])
def test_an_empty_shard_contributes_nothing(shape):
    x = torch.empty(shape)
    statistics = shard_statistics(x)
    assert statistics.shape == (2, shape[1]) and not statistics.any()
    mean, variance = statistics
    invstd = torch.rsqrt(variance + 1e-5)
    assert normalize(x, mean, variance, None, None, 1e-5).shape == shape
    sums = gradient_sums(x, x, mean, invstd)
    assert sums.shape == (2, shape[1]) and not sums.any()
    assert input_gradient(x, x, mean, variance, invstd, None, 1e-5, sums, 8).shape == shape


def test_statistics_of_16_bit_floats_have_32_bits():
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    mean, variance = shard_statistics(x)
    assert mean.dtype == variance.dtype == torch.float32
    torch.testing.assert_close(mean.double(), x.double().mean(0), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(variance.double(), x.double().var(0, correction=0), atol=1e-6, rtol=1e-6)
