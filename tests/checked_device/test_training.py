"""Programs of users whose shards are on a device while they make models and batches on the host, as on a GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from tests.checked_device import DEVICE, counted
from workbench.testing import run_ranks

_DATA = torch.Generator().manual_seed(5)
X, Y = torch.randn(16, 12, generator=_DATA), torch.randint(0, 6, (16,), generator=_DATA)
WORDS = torch.randint(0, 50, (4, 16), generator=_DATA)


def mlp():
    torch.manual_seed(0)
    layers = [nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 6)]
    return nn.Sequential(*layers)


def train(model, step, num_steps=4, make=lambda p: torch.optim.AdamW(p, lr=0.02)):
    """Losses of some steps, and the counts of the last one."""
    optimizer = make(model.parameters())
    losses = []
    for _ in range(num_steps):
        with counted() as counts:
            optimizer.zero_grad()
            losses.append(step(model))
            optimizer.step()
    return [loss.item() for loss in losses], counts


def own_step(model):
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    return loss.detach()


def scheduled_step(model):
    return wb.forward_backward(model, F.cross_entropy, X, Y)


STRATEGIES = {
    "data": ("*: data", 2, own_step, 32),
    "model": ("*: model", 2, own_step, 83),
    "rows and columns": ("0: model; 2: model:row; 5: data", 2, own_step, 40),
    "zero 1": ("*: data | zero=1", 2, own_step, 36),
    "zero 2": ("*: data | zero=2", 2, own_step, 44),
    "zero 3": ("*: data | zero=3", 2, own_step, 87),
    "recompute": ("*: data | recompute", 2, own_step, 53),
    "gpipe": ("pipeline | mb=4 gpipe", 2, scheduled_step, 122),
    "1f1b": ("pipeline | mb=4 1f1b", 2, scheduled_step, 122),
    "interleaved": ("pipeline | mb=4 interleaved", 2, scheduled_step, 144),
    "zero bubble": ("pipeline | mb=4 zero_bubble", 2, scheduled_step, 126),
    "zero bubble recompute": ("pipeline | mb=4 zero_bubble recompute", 2, scheduled_step, 206),
    "zero_bubble_v": ("pipeline | mb=4 zero_bubble_v", 2, scheduled_step, 132),
    "dualpipe_v": ("pipeline | mb=4 dualpipe_v", 2, scheduled_step, 132),
    "offload": ("*: data | offload=optimizer+activations", 2, own_step, 32),
    "hybrid": ("hybrid | mb=2", 4, scheduled_step, 199),
}
"""Strategy, ranks, step, and launches of a step on the busiest rank. Plain torch needs 25."""
TRUTH = train(mlp(), own_step)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_on_a_device_equals_the_host(name):
    strategy, num_ranks, step, num_launches = STRATEGIES[name]
    model = mlp()
    found = run_ranks(lambda: train(wb.parallelize(copy.deepcopy(model), strategy), step), num_ranks, device=DEVICE)
    for losses, counts in found:
        assert losses == pytest.approx(TRUTH, rel=1e-4)
        assert not counts.waits, counts
        assert counts.launches.total() <= num_launches, counts.launches


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=1", "*: data | zero=3"])
def test_a_step_of_an_optimizer_is_fused(make, strategy):
    built = mlp()

    def program():
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = make(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            own_step(model)
            with counted() as counts:
                optimizer.step()
        return counts

    for counts in run_ranks(program, device=DEVICE):
        fused = [number for name, number in counts.launches.items() if name.startswith("_fused_")]
        assert fused == [1], counts.launches
        assert not counts.waits


def test_steps_counted_on_the_host_stay_there():
    """A checkpoint of a step that was not fused."""
    built = mlp()

    def program():
        model = wb.parallelize(copy.deepcopy(built), "*: data")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        own_step(model)
        optimizer.step()
        for group in optimizer.param_groups:
            group["foreach"] = None
        own_step(model)
        optimizer.step()
        return optimizer.state[model[0].weight]["step"].item()

    assert run_ranks(program, device=DEVICE) == [2, 2]


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "share"),
    [("*: data", 2, 2), ("*: data", 4, 4), ("*: data; 2: model", 2, 2), ("*: data | zero=2", 2, 2), ("*: model", 2, 1)],
)
def test_a_rank_copies_its_own_samples_only(strategy, num_ranks, share):
    built = mlp()
    samples = 4 * share  # whose classes and features divide evenly

    def program():
        model = wb.parallelize(copy.deepcopy(built), strategy)
        for _ in range(2):
            with counted() as counts:
                F.cross_entropy(model(X[:samples]), Y[:samples]).backward()
        return counts.bytes_from_host, counts.waits.total()

    found = run_ranks(program, num_ranks, device=DEVICE)
    assert found == [((X[:samples].nbytes + Y[:samples].nbytes) // share, 0)] * num_ranks


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_batch_may_be_written_as_soon_as_the_call_returns(is_pinned):
    built = mlp()

    def step(model):
        x, y = (tensor.pin_memory() if is_pinned else tensor.clone() for tensor in (X, Y))
        out = model[0](x)
        x.fill_(torch.nan)
        loss = F.cross_entropy(model[1:](out), y)
        y.zero_()
        loss.backward()
        return loss.detach()

    for losses, _ in run_ranks(lambda: train(wb.parallelize(copy.deepcopy(built), "*: data"), step), device=DEVICE):
        assert losses == pytest.approx(TRUTH, rel=1e-4)


def gpt():
    torch.manual_seed(0)
    return GPT(64, 2, 50, 16)


def likelihoods(scores, targets):
    return F.nll_loss(F.log_softmax(scores, 1), targets)


def instances():
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (3, 4)), norm, nn.Flatten(), nn.Linear(12, 6))


@pytest.mark.parametrize(
    ("make", "loss_fn", "inputs", "targets", "num_exchanges"),
    [
        (mlp, F.cross_entropy, X, Y, 1),
        (mlp, likelihoods, X, Y, 1),
        (gpt, next_word_loss, WORDS, WORDS, 1),
        (instances, F.cross_entropy, X, Y, 2),  # and one of the running statistics
    ],
)
def test_data_parallelism_launches_hardly_more_than_plain_torch(make, loss_fn, inputs, targets, num_exchanges):
    built = make()

    def on_device(model):
        return loss_fn(model(inputs.to(DEVICE)), targets.to(DEVICE)).backward()

    def on_host(model):
        return loss_fn(model(inputs), targets).backward()

    def launches(model, step, num_ranks, **options):
        def program():
            optimizer = torch.optim.AdamW((made := model()).parameters(), lr=0.02, **options)
            for _ in range(4):
                with counted() as counts:
                    optimizer.zero_grad()
                    step(made)
                    optimizer.step()
            return counts.launches

        return run_ranks(program, num_ranks, device=DEVICE)

    [plain] = launches(lambda: copy.deepcopy(built).to(DEVICE), on_device, 1, fused=True)
    of_exchange = 6  # pack, copy, add, divide
    for found in launches(lambda: wb.parallelize(copy.deepcopy(built), "*: data"), on_host, 2):
        assert found.total() <= 1.05 * plain.total() + of_exchange * num_exchanges, (found, plain)


def test_clipping_launches_as_much_for_many_tensors_as_for_few():
    def launches(num_layers):
        built = nn.Sequential(*(nn.Linear(12, 12) for _ in range(num_layers)))

        def program():
            model = wb.parallelize(copy.deepcopy(built), "*: data")
            for _ in range(2):
                model.zero_grad()
                F.cross_entropy(model(X), Y).backward()
                with counted() as counts:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return counts.launches.total()

        return run_ranks(program, device=DEVICE)

    assert launches(1) == launches(6)
