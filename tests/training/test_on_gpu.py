"""Training under every strategy on a real GPU, which all simulated ranks share.

No module of ``tests.checked_device`` may be imported here: with its device, torch takes that for the machine's
accelerator, and finds no streams of CUDA.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
_DATA = torch.Generator().manual_seed(5)
X, Y = torch.randn(16, 12, generator=_DATA), torch.randint(0, 6, (16,), generator=_DATA)
STRATEGIES = {
    "*: data": 2,
    "*: model": 2,
    "0: model; 2: model:row; 5: data": 2,
    "*: data | zero=1": 2,
    "*: data | zero=2": 2,
    "*: data | zero=3": 2,
    "*: data | zero=3 shards=2": 4,
    "*: data | recompute": 2,
    "pipeline | mb=4 gpipe": 2,
    "pipeline | mb=4 1f1b": 2,
    "pipeline | mb=4 interleaved": 2,
    "pipeline | mb=4 zero_bubble": 2,
    "pipeline | mb=4 zero_bubble recompute": 2,
    "pipeline | mb=4 zero_bubble_v": 2,
    "pipeline | mb=4 dualpipe_v": 2,
    "hybrid | mb=2": 4,
}


def mlp():
    torch.manual_seed(0)
    layers = [nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 6)]
    return nn.Sequential(*layers)


def gpt():
    """With dropout, in attention too."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Linear(12, 32), nn.Unflatten(1, (4, 8)), nn.Linear(8, 32), block, nn.Flatten(1), nn.Linear(128, 6)
    )


def train(model, num_steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        losses.append(wb.forward_backward(model, F.cross_entropy, X, Y))
        optimizer.step()
    return [loss.item() for loss in losses]


def run(make, strategy, num_ranks, device):
    model = make()

    def program():
        wb.manual_seed(3)
        return train(wb.parallelize(copy.deepcopy(model), strategy))

    return run_ranks(program, num_ranks, device=device)


@pytest.mark.parametrize("make", [mlp, gpt])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_on_a_gpu_equals_the_host(make, strategy):
    """The same micro-batches, one after the other, on one device."""
    micro_batches = " | mb=" + strategy.split("mb=")[1][0] if "mb=" in strategy else ""
    [truth] = run(make, f"*: data{micro_batches}", 1, "cpu")
    for losses in run(make, strategy, STRATEGIES[strategy], "cuda:0"):
        assert losses == pytest.approx(truth, rel=1e-3)
