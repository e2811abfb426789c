"""``offload=activations``: the numbers of the same run without it, bit for bit, and less memory."""

import copy
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.training_runs import Setup, assert_trains_like_one_device, on_ranks, strategy_text
from workbench.errors import CaptureError, StrategyError
from workbench.tensors.global_tensor import local_torch
from workbench.testing import run_ranks
from workbench.training.offload import activations, host_memory
from workbench.training.offload.activations import OffloadedActivations

CASES = [
    ("mlp", "data", "1x2x1 mb=2", 2),
    ("cnn", "data", "1x2x1", 2),
    ("llama", "data", "1x2x1 zero=3", 2),
    ("llama", "model", "1x1x2 sequence", 2),
    ("llama", "data", "1x2x1 context=2", 2),
    ("gpt2", "data", "1x2x1 recompute bf16", 2),
    ("llama", "data", "1x2x1 recompute=cheap", 2),
    ("gpt2", "data", "2x1x1 mb=4 1f1b", 2),
    ("gpt2", "data", "2x1x1 mb=4 gpipe recompute", 2),
    ("mlp", "data", "2x1x1 mb=4 zero_bubble", 2),
    ("mlp", "data", "2x1x1 mb=4 interleaved", 2),
    ("mlp", "data", "2x1x1 mb=4 zero_bubble_v", 2),
    ("llama", "data", "1x2x1 zero=1 offload=optimizer", 2),
]


@pytest.fixture(autouse=True)
def small_storages(monkeypatch):
    """What small models save is large enough."""
    monkeypatch.setattr(activations, "MIN_BYTES", 64)


@pytest.fixture
def stored(monkeypatch):
    """The sizes of what is offloaded."""
    sizes, store = [], OffloadedActivations.store

    def counted(self, storage, *args):
        sizes.append(storage.nbytes())
        return store(self, storage, *args)

    monkeypatch.setattr(OffloadedActivations, "store", counted)
    return sizes


def with_activations(options):
    return f"{options}+activations" if "offload" in options else f"{options} offload=activations"


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("kind", "parallel", "options", "num_ranks"), CASES)
def test_the_numbers_are_those_without_it(kind, parallel, options, num_ranks, stored):
    setup = Setup(kind, "adamw", num_steps=3)
    text = strategy_text(kind, parallel, options)
    without = on_ranks(setup, text, num_ranks)
    assert not stored
    found = on_ranks(setup, strategy_text(kind, parallel, with_activations(options)), num_ranks)
    assert len(stored) > 10
    for ours, theirs in zip(found, without, strict=True):
        assert ours.losses == theirs.losses
        assert all(torch.equal(ours.weights[name], weight) for name, weight in theirs.weights.items())


def test_one_device():
    assert_trains_like_one_device(Setup("llama", num_steps=2), "data", "1x2x1 mb=2 offload=activations", 2)


class TwoParts(nn.Module):
    """Two functions save views of what a layer makes, and two others save it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(32, 32)

    def forward(self, x):
        y = self.first(x)
        left, right = y.split(32, -1)
        return self.last(left.sin() * (y.sin() + y.cos()).mean()) + right.cos()


def test_views_are_stored_once_and_weights_never(stored):
    built, x = TwoParts(), torch.randn(10, 16)

    def program():
        model = wb.parallelize(copy.deepcopy(built), "*: data | offload=activations")
        output = model(x)
        sizes = list(stored)
        output.sum().backward()
        return sizes, [p.grad.full_tensor() for p in model.parameters()]

    ((sizes, grads),) = run_ranks(program, 1)
    plain = copy.deepcopy(built)
    plain(x).sum().backward()
    assert all(torch.equal(ours, p.grad) for ours, p in zip(grads, plain.parameters(), strict=True))
    assert sizes.count(4 * 10 * 64) == 1
    assert not {p.nbytes for p in built.parameters()} & set(sizes)


class Written(nn.Module):
    """Writes to what a function has saved, and lets another one save it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x * 1.0
        first = y * self.weight
        y.mul_(2.0)
        return first + y * self.weight


def test_what_is_stored_has_the_value_of_its_time(stored):
    def program():
        model = wb.parallelize(Written(32), "*: data | offload=activations")
        model(torch.ones(1, 32)).sum().backward()
        return model.weight.grad.full_tensor()

    (grad,) = run_ranks(program, 1)
    assert torch.equal(grad, torch.full((32,), 3.0))
    assert stored == [128, 128]


@pytest.mark.parametrize("strategy", ["*: data", "*: data | offload=activations"])
def test_a_write_to_what_stays_is_an_error_as_without_it(strategy, monkeypatch):
    monkeypatch.setattr(activations, "MIN_BYTES", 1000)

    def program():
        model = wb.parallelize(Written(32), strategy)
        model(torch.ones(1, 32)).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_ranks(program, 1)


@pytest.mark.parametrize("least", [64, 10**9])
def test_nothing_outlives_a_graph_that_is_dropped(least, monkeypatch):
    """A tensor that a node saves as its own result would hold the node."""
    monkeypatch.setattr(activations, "MIN_BYTES", least)

    def program():
        model = wb.parallelize(nn.Sequential(nn.Linear(16, 64), nn.Tanh()), "*: data | offload=activations")
        output = model(torch.ones(8, 16))
        with local_torch():
            alive = weakref.ref(output.untyped_storage())
        del output
        return alive() is None

    assert run_ranks(program, 1) == [True]


def test_gradient_accumulation_fusion_is_as_without_it():
    """In place, behind the first micro-batch, which rounds otherwise than adding a gradient."""
    built = nn.Sequential(nn.Linear(32, 1024), nn.Tanh(), nn.Linear(1024, 1024))
    x, y = torch.randn(4096, 32), torch.randn(4096, 1024)

    def program(strategy):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        wb.forward_backward(model, F.mse_loss, x, y)
        return [p.grad.full_tensor() for p in model.parameters()]

    found, without = (
        run_ranks(lambda s=s: program(s), 1)[0] for s in ("*: data | mb=4 offload=activations", "*: data | mb=4")
    )
    assert all(torch.equal(one, other) for one, other in zip(found, without, strict=True))


def test_a_graph_that_is_kept_is_used_again():
    built, x = TwoParts(), torch.randn(10, 16)

    def program():
        model = wb.parallelize(copy.deepcopy(built), "*: data | offload=activations")
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        with torch.no_grad():
            F.linear(torch.ones(64, 64), torch.ones(64, 64))
        loss.backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    (grads,) = run_ranks(program, 1)
    plain = copy.deepcopy(built)
    loss = plain(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.equal(ours, p.grad) for ours, p in zip(grads, plain.parameters(), strict=True))


def test_a_value_that_somebody_keeps_outlives_its_place():
    """What backward has handed out stays what it was, while the next steps store other values."""
    built = nn.Sequential(nn.Linear(16, 64), nn.Tanh())

    def program():
        model = wb.parallelize(built, "*: data | offload=activations")
        kept = model(torch.ones(8, 16)).grad_fn._saved_result
        before = kept.clone()
        for _ in range(3):
            model(torch.randn(8, 16)).sum().backward()
        return torch.equal(kept, before), host_memory.is_offloaded(kept)

    assert run_ranks(program, 1) == [(True, True)]


def test_the_report_counts_them_apart():
    built = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))

    def program(strategy):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        with wb.debug.memory_report(model) as report:
            model(torch.ones(8, 16)).sum().backward()
        return report[0]

    without, found = (run_ranks(lambda s=s: program(s), 1)[0] for s in ("*: data", "*: data | offload=activations"))
    assert without["activations"] == found["activations"] + found["offloaded"]
    assert found["offloaded"] >= 4 * 8 * 64


def test_memory_is_free_and_places_are_used_again(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory.tempfile, "tempdir", str(tmp_path))
    built = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    storages, files, store = [], set(), OffloadedActivations.store

    def watched(self, storage, *args):
        storages.append(weakref.ref(storage))
        stored = store(self, storage, *args)
        files.add(stored.memory.data_ptr())
        return stored

    monkeypatch.setattr(OffloadedActivations, "store", watched)

    def program():
        model = wb.parallelize(built, "*: data | offload=activations")
        before, alive, mapped = mapped_bytes(), [], []
        for _ in range(3):
            output = model(torch.ones(8192, 64))
            alive.append(sum(storage() is not None for storage in storages))
            mapped.append(mapped_bytes() - before)
            output.sum().backward()
            del output
        return alive, mapped

    ((alive, mapped),) = run_ranks(program, 1)
    assert max(alive) <= 2, "what the model is given, and its result"
    assert max(mapped) < 2e6, "one of 17 storages has 2 MB"
    assert len(storages) == 3 * len(files)
    assert list(tmp_path.iterdir()) == []


def mapped_bytes():
    """Resident bytes of files."""
    with open("/proc/self/status") as file:
        return int(re.search(r"RssFile:\s+(\d+)", file.read())[1]) * 1024


def test_an_exception_in_the_forward_leaves_no_hooks():
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 16)

        def forward(self, x):
            raise KeyError(self.first(x).dim())

    def program():
        model = wb.parallelize(Raises(), "*: data | offload=activations")
        with pytest.raises(KeyError, match="2"):
            model(torch.ones(8, 16))
        return torch._C._autograd._top_saved_tensors_default_hooks(False)

    assert run_ranks(program, 1) == [None]


def test_a_captured_step_is_refused():
    def program():
        model = wb.parallelize(nn.Linear(16, 4), "*: data | offload=activations")

        @wb.capture
        def step():
            loss = model(torch.ones(8, 16)).sum()
            loss.backward()
            return loss

        for _ in range(3):
            step()

    with pytest.raises(CaptureError, match=r"offload=activations.*memory_bytes"):
        run_ranks(program, 1)


def test_a_disk_that_fills_up(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    def program():
        model = wb.parallelize(nn.Linear(16, 4), "*: data | offload=activations")
        monkeypatch.setattr(host_memory.os, "posix_fallocate", full)
        model(torch.ones(8, 16))

    with pytest.raises(StrategyError, match=r"offload: .* for files in .* are free"):
        run_ranks(program, 1)
