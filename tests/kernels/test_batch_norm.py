"""The parts of a global batch norm, put together on one device, against torch's batch norm."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import sync_batch_norm  # noqa: F401 - it gives torch's kernels for GPUs to CPU tensors
from workbench.kernels import batch_norm
from workbench.kernels.batch_norm import Shares, combine, gradient_sums, input_gradient, normalize, shard_statistics

SHAPES = [(7, 5), (3, 4, 9), (6, 3, 5, 4), (2, 3, 2, 3, 2)]
TOLERANCES = [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-5)]
EPS, MOMENTUM = 1e-5, 0.3


@pytest.fixture(params=["host", "formulas of the GPU's", pytest.param("GPU", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where the tensors lie, and whose kernels run."""
    if request.param == "GPU" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "formulas of the GPU's":
        monkeypatch.setattr(batch_norm, "_HOSTS", frozenset())
    return "cuda" if request.param == "GPU" else "cpu"


def parts(x, dy, weight, bias, counts):
    """Output, gradients, and running statistics, of the shards of a batch cut behind so many samples."""
    shares = Shares.of([n * x[0, 0].numel() for n in counts], x.dtype, x.device)
    shards, of_dy = x.split(counts), dy.split(counts)
    running = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    rows = torch.stack([shard_statistics(shard, EPS) for shard in shards])
    statistics = combine(rows, shares, EPS, running, MOMENTUM)
    sums = [gradient_sums(d, shard, statistics, weight) for d, shard in zip(of_dy, shards, strict=True)]
    totals = sum(each[0] for each in sums)
    y = torch.cat([normalize(shard, statistics, weight, bias, EPS) for shard in shards])
    dx = [
        input_gradient(d, shard, statistics, weight, EPS, totals, shares)
        for d, shard in zip(of_dy, shards, strict=True)
    ]
    of_bias, of_weight = (sum(each[number] for each in sums) for number in ((1, 2) if weight is not None else (1, 1)))
    return y, torch.cat(dx), of_bias, of_weight, *running


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize("affine", [False, True])
def test_the_parts_equal_torchs_batch_norm(shape, dtype, atol, rtol, affine, device):
    generator = torch.Generator().manual_seed(0)
    x, dy = ((torch.randn(shape, dtype=dtype, generator=generator) * 2 + 1).to(device) for _ in range(2))
    weights = [torch.randn(shape[1], dtype=dtype, generator=generator).to(device) for _ in range(2)]
    weight, bias = (each.requires_grad_() for each in weights)
    given = (weight, bias) if affine else (None, None)
    running = x.new_zeros(shape[1]), x.new_ones(shape[1])
    x.requires_grad_()
    expected = F.batch_norm(x, *running, *given, training=True, momentum=MOMENTUM, eps=EPS)
    expected.backward(dy)

    with torch.no_grad():
        y, dx, of_bias, of_weight, *moved = parts(x, dy, *given, [1, len(x) - 1, 0])
    pairs = [(y, expected), (dx, x.grad), *zip(moved, running, strict=True)]
    if affine:
        pairs += [(of_bias, bias.grad), (of_weight, weight.grad)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (0, 3)])
def test_an_empty_shard_contributes_nothing(shape, device):
    x = torch.empty(shape, device=device)
    rows = shard_statistics(x, EPS)
    assert rows.shape == (2, shape[1]) and rows.isfinite().all()
    shares = Shares.of([8, 0], torch.float32, x.device)
    statistics = combine(torch.stack([torch.ones_like(rows), rows]), shares, EPS, None, 0.0)
    assert normalize(x, statistics, None, None, EPS).shape == shape
    sums, *_ = gradient_sums(x, x, statistics, None)
    assert sums.shape == (2, shape[1]) and not sums.any()
    assert input_gradient(x, x, statistics, None, EPS, sums, shares).shape == shape


def test_statistics_of_16_bit_floats_have_32_bits():
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    mean, variance = shard_statistics(x, EPS)
    assert mean.dtype == variance.dtype == torch.float32
    torch.testing.assert_close(mean.double(), x.double().mean(0), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(variance.double(), x.double().var(0, correction=0), atol=1e-6, rtol=1e-6)
