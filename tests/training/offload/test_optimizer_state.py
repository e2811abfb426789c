"""``offload=optimizer``: the numbers of the same run without it, bit for bit, and less memory."""

import copy
import errno
import gc
import io
import os
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import StrategyError
from workbench.testing import run_ranks
from workbench.training.gradients import state_on_host
from workbench.training.offload import host_memory
from workbench.training.offload.host_memory import is_offloaded

_DATA = torch.Generator().manual_seed(5)
X, Y = torch.randn(16, 12, generator=_DATA), torch.randint(0, 6, (16,), generator=_DATA)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.02, foreach=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "groups": lambda p: torch.optim.RMSprop([{"params": p[:3], "lr": 0.1}, {"params": p[3:], "momentum": 0.5}]),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Several buckets for small models."""
    monkeypatch.setattr(state_on_host, "BUCKET_BYTES", 600)


def mlp():
    torch.manual_seed(0)
    layers = [nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 6)]
    return nn.Sequential(*layers)


def offloaded(strategy):
    return strategy + (" " if "|" in strategy else " | ") + "offload=optimizer"


def tensors_of(optimizer):
    return [v for kept in optimizer.state.values() for v in kept.values() if isinstance(v, torch.Tensor) and v.dim()]


def step_of(model, optimizer):
    """One step; the loss."""
    optimizer.zero_grad()
    loss = wb.forward_backward(model, F.cross_entropy, X, Y)
    optimizer.step()
    return loss


def weights_of(model):
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def trained(strategy, make, num_ranks=2, **world):
    """By rank: losses, weights, this rank's state and where it lies."""
    built = mlp()

    def program():
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = make(list(model.parameters()))
        losses = [step_of(model, optimizer).item() for _ in range(4)]
        kept = tensors_of(optimizer)
        return losses, weights_of(model), [v.clone() for v in kept], {is_offloaded(v) for v in kept}

    return run_ranks(program, num_ranks, **world)


def assert_equal(found, expected):
    """The same bits: of losses, weights and states."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        for one, other in zip(ours[1] + ours[2], theirs[1] + theirs[2], strict=True):
            assert torch.equal(one, other)


STRATEGIES = [
    ("*: data", 2),
    ("*: model", 2),
    ("*: data | zero=1", 2),
    ("*: data | zero=2 mb=2", 2),
    ("*: data | zero=3 recompute", 2),
    ("pipeline | mb=4 1f1b", 2),
    ("pipeline | mb=4 zero_bubble", 2),
    ("hybrid | mb=2 bf16", 4),
    ("*: data", 1),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("strategy", "num_ranks"), STRATEGIES)
def test_the_numbers_are_those_without_it(strategy, num_ranks):
    make = OPTIMIZERS["adamw"]
    found = trained(offloaded(strategy), make, num_ranks)
    assert_equal(found, trained(strategy, make, num_ranks))
    assert all(places == {True} for *_, places in found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=3"])
def test_optimizers(strategy, name):
    found = trained(offloaded(strategy), OPTIMIZERS[name])
    assert_equal(found, trained(strategy, OPTIMIZERS[name]))
    assert {place for *_, places in found for place in places} == ({True} if name != "sgd without state" else set())


def test_a_wrong_number_is_seen():
    found = trained("*: data", OPTIMIZERS["adamw"])
    other = copy.deepcopy(found)
    other[0][2][0].view(-1)[0] += 1
    with pytest.raises(AssertionError):
        assert_equal(other, found)


def test_a_closure_gives_its_loss_and_hooks_see_all_parameters():
    built = mlp()

    def program(strategy):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        seen = []
        optimizer.register_step_pre_hook(lambda o, *_: seen.append([len(o.param_groups[0]["params"])]))
        optimizer.register_step_post_hook(lambda o, *_: seen.append([len(o.param_groups[0]["params"])]))

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item(), optimizer.step(closure=closure).item()]
        return losses, weights_of(model), tensors_of(optimizer), seen

    found = run_ranks(lambda: program("*: data | offload=optimizer"))
    assert_equal(found, run_ranks(lambda: program("*: data")))
    assert [seen for *_, seen in found] == [[[6]] * 4] * 2


def test_a_parameter_that_gets_a_gradient_later_and_a_step_that_is_interrupted():
    built = mlp()

    def program(strategy):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for number in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            if number < 2:
                model[0].weight.grad = None
            if number == 2:
                handle = optimizer.register_step_pre_hook(_fail)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                handle.remove()
            optimizer.step()
        return [], weights_of(model), [v.clone() for v in tensors_of(optimizer)]

    assert_equal(run_ranks(lambda: program("*: data | offload=optimizer")), run_ranks(lambda: program("*: data")))


def _fail(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", ["state_dict", "file", "checkpoint"])
@pytest.mark.filterwarnings("ignore:torch.save or pickle of a global tensor")
def test_state_is_saved_and_loaded(way, tmp_path):
    built = mlp()

    def program(strategy, folder):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for _ in range(2):
            step_of(model, optimizer)
        if way == "checkpoint":
            wb.checkpoint.save(folder, model=model, optimizer=optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        if way == "file":
            torch.save(optimizer.state_dict(), file := io.BytesIO())
            file.seek(0)
            state = torch.load(file, weights_only=False)
        for _ in range(2):
            step_of(model, optimizer)
        if way == "checkpoint":
            wb.checkpoint.load(folder, model=model, optimizer=optimizer)
        elif way == "deepcopy":
            model, optimizer = copy.deepcopy((model, optimizer))
        else:
            optimizer.load_state_dict(state)
        losses = [step_of(model, optimizer).item() for _ in range(2)]
        return losses, weights_of(model), [v.clone() for v in tensors_of(optimizer)], tensors_of(optimizer)

    found = run_ranks(lambda: program("*: data | zero=1 offload=optimizer", tmp_path / "with"))
    assert_equal(found, run_ranks(lambda: program("*: data | zero=1", tmp_path / "without")))
    assert all(is_offloaded(v) for *_, kept in found for v in kept)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("passes_optimizer", [False, True])
def test_the_strategy_changes_during_training(passes_optimizer):
    built = mlp()
    first, second = ("*: data", "*: data") if not passes_optimizer else ("*: data | zero=1", "*: model")

    def program(on, off):
        model = wb.parallelize(copy.deepcopy(built), on)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        places = []
        for strategy in (on, off, on):
            wb.parallelize(model, strategy, optimizer=optimizer if passes_optimizer else None)
            for _ in range(2):
                step_of(model, optimizer)
            places.append({is_offloaded(v) for v in tensors_of(optimizer)})
        return [], weights_of(model), [v.clone() for v in tensors_of(optimizer)], places

    found = run_ranks(lambda: program(offloaded(first), second))
    assert_equal(found, run_ranks(lambda: program(first, second)))
    assert [places for *_, places in found] == [[{True}, {False}, {True}]] * 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=1", "pipeline | mb=2"])
def test_a_captured_step(strategy):
    built = mlp()

    def program(strategy):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = OPTIMIZERS["adamw"](model.parameters())

        @wb.capture
        def step():
            optimizer.zero_grad()
            loss = wb.forward_backward(model, F.cross_entropy, X, Y)
            optimizer.step()
            return loss

        losses = [step().item() for _ in range(5)]
        kept = tensors_of(optimizer)
        return losses, weights_of(model), [v.clone() for v in kept], step.num_replays, {is_offloaded(v) for v in kept}

    found = run_ranks(lambda: program(offloaded(strategy)))
    assert_equal(found, run_ranks(lambda: program(strategy)))
    assert all(replays and places == {True} for *_, replays, places in found)


def test_the_report_counts_it_apart():
    built = mlp()

    def program(strategy):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step_of(model, optimizer)
        report = wb.debug.memory_report(model, optimizer)
        return report[0], str(report)

    (with_it, text), (without, _) = (
        run_ranks(lambda s=s: program(s))[0] for s in ("*: data | offload=optimizer", "*: data")
    )
    size = sum(p.nbytes for p in built.parameters())
    assert (with_it["optimizer"], with_it["offloaded"]) == (0, size)
    assert (without["optimizer"], "offloaded" in without) == (size, False)
    assert with_it["total"] == without["total"] - size
    assert "offloaded" in text.splitlines()[0]


def test_pages_are_given_back_and_the_file_has_no_name(monkeypatch, tmp_path):
    monkeypatch.setattr(state_on_host, "BUCKET_BYTES", 2**21)
    monkeypatch.setattr(host_memory.tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(0)
    built = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))

    def program():
        model = wb.parallelize(built, "*: data | offload=optimizer")
        optimizer = torch.optim.AdamW(model.parameters())
        before = mapped_bytes()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 512)).sum().backward()
            optimizer.step()
        return sum(v.nbytes for v in tensors_of(optimizer)), mapped_bytes() - before

    ((size, mapped),) = run_ranks(program, 1)
    assert size > 16e6
    assert mapped < 2e6
    assert list(tmp_path.iterdir()) == []


def mapped_bytes():
    """Resident bytes of files."""
    with open("/proc/self/status") as file:
        return int(re.search(r"RssFile:\s+(\d+)", file.read())[1]) * 1024


class Own(torch.optim.AdamW):
    elementwise = True

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("make", [Own, torch.optim.LBFGS, torch.optim.Adafactor])
def test_optimizers_that_cannot(make):
    model = mlp()

    def program():
        optimizer = make(wb.parallelize(copy.deepcopy(model), "*: data | offload=optimizer").parameters())
        with pytest.raises(StrategyError, match=rf"offload=optimizer: {make.__name__} over 6 parameters.*Use one"):
            optimizer.step(lambda: torch.zeros(()))

    run_ranks(program)


def test_too_little_space_is_an_error_before_training(monkeypatch):
    monkeypatch.setattr(psutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))

    def program():
        wb.parallelize(mlp(), "*: data | offload=optimizer")

    with pytest.raises(
        StrategyError, match=r"offload=optimizer: 9\.31 kB for files in .*, where 1\.00 kB are free.*TMPDIR"
    ):
        run_ranks(program)


@pytest.mark.parametrize(("later", "is_given"), [("*: data | mb=2 zero=1", True), ("*: data | mb=2", False)])
def test_a_change_of_strategy_needs_no_second_place_on_the_disk(monkeypatch, later, is_given):
    """Here the disk is full while state lies there. That of an optimizer that is not given stays there."""
    gc.collect()
    others = set(host_memory._addresses)
    free = lambda: 10 if host_memory._addresses - others else 10**4  # noqa: E731
    monkeypatch.setattr(psutil, "disk_usage", lambda folder: SimpleNamespace(free=free()))
    built = mlp()

    def program(*strategies):
        model = wb.parallelize(copy.deepcopy(built), strategies[0])
        optimizer, losses = OPTIMIZERS["adamw"](model.parameters()), []
        for strategy in strategies:
            wb.parallelize(model, strategy, optimizer=optimizer if is_given else None)
            losses.append(step_of(model, optimizer).item())
        kept = tensors_of(optimizer)
        return losses, weights_of(model), [v.clone() for v in kept], {is_offloaded(v) for v in kept}

    found = run_ranks(lambda: program(offloaded("*: data"), offloaded(later)))
    assert_equal(found, run_ranks(lambda: program("*: data", later)))
    assert all(places == {True} for *_, places in found)


def test_a_disk_that_fills_up(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    built = mlp()

    def program():
        model = wb.parallelize(copy.deepcopy(built), "*: data | offload=optimizer")
        step_of(model, OPTIMIZERS["adamw"](model.parameters()))

    with pytest.raises(StrategyError, match=r"offload: .* for files in .* are free"):
        run_ranks(program)
