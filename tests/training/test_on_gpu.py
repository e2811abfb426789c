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
from benchmarks.gpt import GPT, next_word_loss
from tests.training.strategies.mixtures import Mixture, batch_of
from workbench.testing import run_ranks
from workbench.training.gradients import state_on_host
from workbench.training.offload import activations

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
_DATA = torch.Generator().manual_seed(5)
X, Y = torch.randn(16, 12, generator=_DATA), torch.randint(0, 6, (16,), generator=_DATA)
WORDS = torch.randint(0, 11, (4, 12), generator=_DATA)
IMAGES = torch.randn(16, 3, 6, 6, generator=_DATA)
STRATEGIES = {
    "*: data": 2,
    "*: model": 2,
    "0: model; 2: model:row; 5: data": 2,
    "*: data | zero=1": 2,
    "*: data | zero=2": 2,
    "*: data | zero=3": 2,
    "*: data | zero=3 shards=2": 4,
    "*: data | recompute": 2,
    "*: data | recompute=cheap": 2,
    "*: data | zero=2 recompute=attention": 2,
    "*: data | zero=1 offload=optimizer": 2,
    "*: data | offload=optimizer+activations": 2,
    "pipeline | mb=4 1f1b offload=activations": 2,
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


def texts():
    """A GPT without dropout."""
    torch.manual_seed(0)
    return GPT(96, 2, 11, 12)


def mixture():
    torch.manual_seed(0)
    return Mixture().float()


def pictures():
    """With batch norm, whose statistics are those of all ranks."""
    torch.manual_seed(0)
    first, second = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (nn.Linear(128, 16), nn.BatchNorm1d(16, affine=False))
    return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), *second, nn.ReLU(), nn.Linear(16, 6))


def seen(model):
    loss = F.cross_entropy(model(IMAGES), Y)
    loss.backward()
    return loss.detach()


def classified(model):
    return wb.forward_backward(model, F.cross_entropy, X, Y)


def predicted(model):
    return wb.forward_backward(model, next_word_loss, WORDS, WORDS)


def mixed(model):
    features, classes = batch_of(0)
    loss = model(features.float(), classes)
    loss.backward()
    return loss.detach()


def train(model, step=classified, num_steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        losses.append(step(model))
        optimizer.step()
    return [loss.item() for loss in losses]


def run(make, strategy, num_ranks, device, step=classified):
    model = make()

    def program():
        wb.manual_seed(3)
        return train(wb.parallelize(copy.deepcopy(model), strategy), step)

    return run_ranks(program, num_ranks, device=device)


@pytest.fixture
def offloads_small_tensors(monkeypatch):
    monkeypatch.setattr(state_on_host, "BUCKET_BYTES", 600)
    monkeypatch.setattr(activations, "MIN_BYTES", 64)


@pytest.mark.usefixtures("offloads_small_tensors")
@pytest.mark.parametrize("make", [mlp, gpt])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_on_a_gpu_equals_the_host(make, strategy):
    """The same micro-batches, one after the other, on one device."""
    micro_batches = " | mb=" + strategy.split("mb=")[1][0] if "mb=" in strategy else ""
    [truth] = run(make, f"*: data{micro_batches}", 1, "cpu")
    for losses in run(make, strategy, STRATEGIES[strategy], "cuda:0"):
        assert losses == pytest.approx(truth, rel=1e-3)


SEQUENCES_AND_EXPERTS = [
    (texts, predicted, "*: model | sequence", 2),
    (texts, predicted, "*: model | sequence overlap=2", 2),
    (texts, predicted, "*: data | context=2", 2),
    (texts, predicted, "*: data | context=4", 4),
    (texts, predicted, "*: data; blocks.*: model", 4),
    (mixture, mixed, "*: expert", 2),
]


@pytest.mark.parametrize(("make", "step", "strategy", "num_ranks"), SEQUENCES_AND_EXPERTS)
def test_sequences_and_experts_on_a_gpu_equal_the_host(make, step, strategy, num_ranks):
    """With 3 heads, ranks hold uneven numbers of them, or the sequence passes as a ring."""
    [truth] = run(make, "*: data", 1, "cpu", step)
    for losses in run(make, strategy, num_ranks, "cuda:0", step):
        assert losses == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=3", "*: data | recompute"])
def test_batch_norm_on_a_gpu_equals_the_host(strategy, num_ranks):
    [truth] = run(pictures, "*: data", 1, "cpu", seen)
    for losses in run(pictures, strategy, num_ranks, "cuda:0", seen):
        assert losses == pytest.approx(truth, rel=1e-3)


def test_batch_norm_in_16_bits_on_a_gpu():
    [truth] = run(pictures, "*: data", 1, "cpu", seen)
    for losses in run(pictures, "*: data | bf16", 2, "cuda:0", seen):
        assert losses == pytest.approx(truth, rel=5e-2) and losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", ["*: data | bf16", "*: model | bf16", "*: data | zero=3 bf16"])
def test_training_in_16_bits_on_a_gpu(strategy):
    [truth] = run(mlp, "*: data", 1, "cpu")
    for losses in run(mlp, strategy, 2, "cuda:0"):
        assert losses == pytest.approx(truth, rel=3e-2) and losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", ["*: data | fp8", "*: model | fp8"])
def test_training_in_8_bits_on_a_gpu(strategy):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply numbers of 8 bits")
    [truth] = run(texts, "*: data | fp8", 1, "cpu", predicted)
    for losses in run(texts, strategy, 2, "cuda:0", predicted):
        assert losses == pytest.approx(truth, rel=0.1) and losses[-1] < losses[0]
