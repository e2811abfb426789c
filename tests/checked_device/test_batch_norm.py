"""Batch norm by the kernels of torch's ``SyncBatchNorm``: the numbers of one device, and few launches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.checked_device import DEVICE
from tests.checked_device.nccl_launches import count_nccl_calls
from tests.checked_device.test_training import X, Y, own_step, train
from tests.tensors.dispatch.test_batch_norm import (
    GRID,
    LINE,
    SHAPES,
    as_global,
    assert_as_one_device,
    draw,
    norm_of,
    placed,
    step,
)
from tests.transport.nccl_ranks import run_over_nccl
from tests.transport.shared_ranks import assert_all_returned
from workbench.testing import run_ranks

CASES = [
    ("1d", LINE, ["S(0)"], {}),
    ("2d", LINE, ["S(2)"], {}),
    ("few", GRID, ["S(0)", "S(0)"], {}),  # 2 samples on 4 ranks
    ("1d", [2, 0], ["S(0)"], {}),  # rank 1 is outside
    ("1d long", GRID, ["S(0)", "S(1)"], {}),
    ("2d", GRID, ["S(0)", "P"], {}),
    ("1d", LINE, ["S(1)"], {}),
    ("1d", LINE, ["B"], {}),
    ("2d", LINE, ["S(0)"], {"affine": False}),
    ("2d", LINE, ["S(0)"], {"tracks": False}),
    ("2d", LINE, ["S(0)"], {"momentum": None}),
]


@pytest.mark.parametrize(("kind", "ranks", "sbp", "options"), CASES)
def test_the_numbers_are_those_of_one_device(kind, ranks, sbp, options):
    assert_as_one_device(SHAPES[kind], ranks, sbp, DEVICE, **options)


@pytest.mark.parametrize("wide", ["weights", "statistics", "both", "neither"])
def test_16_bits_are_as_exact_as_on_one_device(wide):
    """With weights and running statistics of 32 bits, as under autocast, or of 16, as in a converted model."""
    shape, dtype = (48, 3, 5, 5), torch.bfloat16
    full = draw(*shape, offset=2.0).to(dtype)
    exact_module = norm_of(shape).to(dtype).double()
    exact = [*step(exact_module, full.double().requires_grad_()), *exact_module.buffers()]

    def program():
        module = norm_of(shape).to(dtype).float()
        for name in () if wide in ("weights", "both") else ("weight", "bias"):
            setattr(module, name, nn.Parameter(getattr(module, name).detach().to(dtype)))
        for name in () if wide in ("statistics", "both") else ("running_mean", "running_var"):
            setattr(module, name, getattr(module, name).to(dtype))
        module = as_global(module, LINE, 1)
        found = [*step(module, placed(full, LINE, ["S(0)"])), *module.buffers()]
        return [each.full_tensor().double().cpu() for each in found]

    for found in run_ranks(program, 3, device=DEVICE):
        for ours, truth in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, truth.double(), rtol=0.02, atol=0.01 * float(truth.abs().max()))


def test_a_bias_alone_and_statistics_in_another_layout():
    full, bias = draw(7, 6), torch.linspace(-1, 1, 6, dtype=torch.float64)
    mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    expected = F.batch_norm(full, mean, var, None, bias, True, 0.3)

    def program():
        places = wb.placement(DEVICE.type, ranks=LINE)
        running = [
            wb.to_global(t, placement=places, sbp="B").to_global(sbp="S(0)")
            for t in (torch.zeros_like(mean), torch.ones_like(var))
        ]
        offset = wb.to_global(bias.clone(), placement=places, sbp="B").requires_grad_()
        y = F.batch_norm(placed(full, LINE, ["S(0)"]), *running, None, offset, True, 0.3)
        y.sum().backward()
        return [t.full_tensor().detach().cpu() for t in (y, *running, offset.grad)]

    for found in run_ranks(program, 3, device=DEVICE):
        torch.testing.assert_close(found, [expected, mean, var, torch.full_like(bias, 7.0)])


def test_a_boxing_of_statistics_is_not_used_after_they_have_moved():
    """torch's kernel moves them without counting the write, by which implicit boxings are cached."""

    def program():
        module = as_global(norm_of((8, 4)), LINE, 1)
        x, outputs = placed(draw(8, 4), LINE, ["S(1)"]), []
        for _ in range(2):
            module.eval()
            outputs.append(module(x).full_tensor().cpu())  # boxes the statistics to S(0)
            module.train()
            module(placed(draw(8, 4), LINE, ["S(0)"]))
        return outputs

    for first, second in run_ranks(program, 3, device=DEVICE):
        assert not torch.allclose(first, second)


def net():
    layers = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6)
    for parameter in nn.Sequential(*layers).parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return nn.Sequential(*layers)


def on_device(model):
    loss = F.cross_entropy(model(X.to(DEVICE)), Y.to(DEVICE))
    loss.backward()
    return loss.detach()


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, fused=True)


LAUNCHES = {
    "batch_norm_stats": 1,
    "batch_norm_gather_stats_with_counts": 1,
    "batch_norm_elemt": 1,
    "batch_norm_backward_reduce": 1,
    "batch_norm_backward_elemt": 1,
    "cat": 4,  # of statistics, of sums, of these for the all-reduce, and of the bucket of gradients
    "all_gather_into_tensor": 1,
    "all_reduce": 2,  # one of the bucket
    "div": 2,  # of the loss by the number of samples, and of its gradient
}
"""What a step of data parallelism launches beyond plain torch."""


def test_a_layer_is_five_kernels_and_two_exchanges(monkeypatch):
    count_nccl_calls(monkeypatch)
    [(truth, plain)] = run_ranks(lambda: train(net().to(DEVICE), on_device, make=fused), 1, device=DEVICE)
    assert plain.launches["native_batch_norm"] == plain.launches["native_batch_norm_backward"] == 1
    found = run_over_nccl(lambda rank: train(wb.parallelize(net(), "*: data"), own_step), device=DEVICE)
    for losses, counts in assert_all_returned(found):
        assert losses == pytest.approx(truth, rel=1e-4)
        assert not counts.waits
        assert dict(counts.launches - plain.launches) == LAUNCHES
