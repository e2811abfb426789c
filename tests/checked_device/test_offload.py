"""``offload=`` on a device: pinned memory, copies on a stream of their own, and no wait of the host."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import workbench as wb
from tests.checked_device import DEVICE, counted
from tests.checked_device.test_training import X, Y, mlp, own_step, scheduled_step
from workbench.testing import run_ranks
from workbench.training.gradients import state_on_host
from workbench.training.offload import activations
from workbench.training.offload.activations import DeviceCopies
from workbench.training.offload.host_memory import is_offloaded
from workbench.training.offload.staging import Staging
from workbench.training.runs.compiled_steps import CompiledSteps

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.02, foreach=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
STRATEGIES = {
    "*: data |": own_step,
    "*: model |": own_step,
    "*: data | zero=1": own_step,
    "*: data | zero=3 recompute": own_step,
    "pipeline | mb=4 1f1b": scheduled_step,
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Several buckets for small models, whose activations are large enough, and soon more than may leave at a time."""
    monkeypatch.setattr(state_on_host, "BUCKET_BYTES", 600)
    monkeypatch.setattr(activations, "MIN_BYTES", 64)
    monkeypatch.setattr(activations, "MAX_LEAVING", 1)


def tensors_of(optimizer):
    return [v for kept in optimizer.state.values() for v in kept.values() if isinstance(v, torch.Tensor) and v.dim()]


def trained(strategy, make=OPTIMIZERS["adamw"], step=own_step):
    """By rank: losses, weights and state; where the state lies; the counts of the last step."""
    built = mlp()

    def program():
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = make(model.parameters())
        losses = []
        for _ in range(4):
            with counted() as counts:
                optimizer.zero_grad()
                losses.append(step(model))
                optimizer.step()
        states = tensors_of(optimizer)
        losses = [torch.tensor(loss.item()) for loss in losses]
        numbers = [v.detach().cpu().clone() for v in (*losses, *(p.full_tensor() for p in model.parameters()), *states)]
        return numbers, {is_offloaded(v) for v in states}, counts

    return run_ranks(program, device=DEVICE)


def same(found, expected):
    return all(
        torch.equal(one, other)
        for ours, theirs in zip(found, expected, strict=True)
        for one, other in zip(ours[0], theirs[0], strict=True)
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kinds", ["optimizer", "activations", "optimizer+activations"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_numbers_are_those_without_it_and_nothing_waits(strategy, kinds):
    step = STRATEGIES[strategy]
    found = trained(f"{strategy} offload={kinds}", step=step)
    assert same(found, trained(strategy.removesuffix(" |"), step=step))
    for _, places, counts in found:
        assert places == {"optimizer" in kinds}
        assert not counts.waits, counts


def test_a_scaler_skips_and_takes_steps():
    """Gradients in 16 bits: torch's scaler reads one number of the device, and the fused step unscales."""
    built = mlp()

    def program(strategy):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer, scaler = OPTIMIZERS["adamw"](model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**24)
        for _ in range(12):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(X).float(), Y)).backward()
            scaler.step(optimizer)
            scaler.update()
        weights = [p.full_tensor() for p in model.parameters()]
        return [v.detach().cpu().clone() for v in (*weights, *tensors_of(optimizer))], scaler.get_scale()

    found = run_ranks(lambda: program("*: data | fp16 offload=optimizer"), device=DEVICE)
    assert same(found, run_ranks(lambda: program("*: data | fp16"), device=DEVICE))
    assert found[0][1] < 2.0**24
    assert len(found[0][0]) == 3 * len(list(built.parameters())), "some steps were taken"


def test_activations_go_and_come(monkeypatch):
    moved, copy = [], DeviceCopies._copy
    monkeypatch.setattr(
        DeviceCopies, "_copy", lambda *args: (moved.append(args[3].device.type == DEVICE.type), copy(*args))[1]
    )
    trained("*: data | offload=activations")
    out, back = moved.count(False), moved.count(True)
    assert out > back > 0, "the last ones have not left"


def test_activations_that_are_read_too_early_are_wrong(monkeypatch):
    begin, here = DeviceCopies._begin, DeviceCopies.bring_back

    def without_wait(self, stored, following):
        for one in (stored, *following):
            begin(self, one)
        if stored in self._leaving:
            return here(self, stored, ())
        return stored.here

    monkeypatch.setattr(DeviceCopies, "bring_back", without_wait)
    assert not same(trained("*: data | offload=activations"), trained("*: data"))


def test_a_copy_out_waits_for_what_makes_the_activation(monkeypatch):
    monkeypatch.setattr(DEVICE_STREAM, "wait_stream", lambda *_: None)
    with pytest.raises(AssertionError, match="copies memory that launch"):
        trained("*: data | offload=activations")


@pytest.mark.sampled(3, start=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    make = OPTIMIZERS[name]
    assert same(trained("*: data | offload=optimizer", make), trained("*: data", make))


def test_a_step_for_which_the_device_has_no_memory_can_be_taken_again(monkeypatch):
    built, make, failed = mlp(), Staging.buffer, set()

    def buffer(self, slot, num_bytes):
        if slot == 1 and num_bytes and self not in failed:
            failed.add(self)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(self, slot, num_bytes)

    monkeypatch.setattr(Staging, "buffer", buffer)

    def program(strategy):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for number in range(3):
            optimizer.zero_grad()
            own_step(model)
            if number == 1 and "offload" in strategy:
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
            optimizer.step()
        weights = [p.full_tensor() for p in model.parameters()]
        return [v.detach().cpu().clone() for v in (*weights, *tensors_of(optimizer))], 0

    found = run_ranks(lambda: program("*: data | offload=optimizer"), device=DEVICE)
    assert len(failed) == 2
    assert same(found, run_ranks(lambda: program("*: data"), device=DEVICE))


def test_a_buffer_that_is_read_too_early_gives_wrong_numbers(monkeypatch):
    monkeypatch.setattr(Staging, "wait", lambda *_: None)
    assert not same(trained("*: data | offload=optimizer"), trained("*: data"))


def test_state_that_is_read_too_early_is_wrong(monkeypatch):
    monkeypatch.setattr(Staging, "synchronize", lambda *_: None)
    assert not same(trained("*: data | offload=optimizer"), trained("*: data"))


def test_a_copy_back_waits_for_the_step(monkeypatch):
    monkeypatch.setattr(DEVICE_STREAM, "wait_stream", lambda *_: None)
    with pytest.raises(AssertionError, match="copies memory that launch"):
        trained("*: data | offload=optimizer")


DEVICE_STREAM = torch.get_device_module(DEVICE).Stream


def test_the_strategy_changes_and_state_is_saved(tmp_path):
    built = mlp()

    def program(on, off, folder):
        model = wb.parallelize(copy.deepcopy(built), on)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for strategy in (on, off, on):
            wb.parallelize(model, strategy, optimizer=optimizer)
            for _ in range(2):
                optimizer.zero_grad()
                own_step(model)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        wb.checkpoint.save(folder, model=model, optimizer=optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        for load in (lambda: wb.checkpoint.load(folder, model=model, optimizer=optimizer), lambda: None):
            load()
            optimizer.zero_grad()
            own_step(model)
            optimizer.step()
        optimizer.load_state_dict(state)
        own_step(model)
        optimizer.step()
        return [
            v.detach().cpu().clone() for v in (*(p.full_tensor() for p in model.parameters()), *tensors_of(optimizer))
        ], 0

    found = run_ranks(lambda: program("*: data | zero=1 offload=optimizer", "*: model", tmp_path / "on"), device=DEVICE)
    assert same(found, run_ranks(lambda: program("*: data | zero=1", "*: model", tmp_path / "off"), device=DEVICE))


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("run", ["refused", "captured"])
def test_state_around_refused_and_replayed_steps(run):
    """A refused step restores the state while copies of it are under way. A replay steps on a plain dict of torch's,
    which ``load_state_dict`` makes, and then the state is read at once.
    """
    built, batch = mlp(), (X.to(DEVICE), Y.to(DEVICE))

    def program(strategy):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer, kept = OPTIMIZERS["adamw"](model.parameters()), []

        def step(inputs, targets):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if run == "refused":
                kept.append(loss.detach() * 2)  # outlives the step
            return loss.detach()

        made = CompiledSteps(step, model, optimizer, torch.Generator()) if run == "refused" else wb.capture(step)
        losses = [torch.tensor(made(*batch).item()) for _ in range(4)]
        if run == "captured":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            losses += [made(*batch).cpu() for _ in range(2)]
        assert made.problem if run == "refused" else made.num_replays
        state = optimizer.state_dict()["state"].values()
        return [v.detach().cpu().clone() for v in (*losses, *(each["exp_avg"] for each in state))], 0

    assert same(
        run_ranks(lambda: program("*: data | offload=optimizer"), device=DEVICE),
        run_ranks(lambda: program("*: data"), device=DEVICE),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["*: data | zero=1", "*: model |"])
def test_parts_of_state_are_exchanged_from_the_host(strategy):
    built = mlp()

    def program(strategy):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        own_step(model)
        optimizer.step()
        parts = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
        whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
        held = {part.device.type for part in parts if isinstance(part, wb.GlobalTensor)}
        sums = [part.sum().item() for part in parts]  # on the host, then over the ranks
        parts = [part.full_tensor() if isinstance(part, wb.GlobalTensor) else part for part in parts]
        values = [v.detach().cpu() for v in (*parts, *(each["exp_avg"] for each in whole.values()))]
        return [*values, torch.tensor(sums)], held

    found = run_ranks(lambda: program(f"{strategy} offload=optimizer"), device=DEVICE)
    assert same(found, run_ranks(lambda: program(strategy.removesuffix(" |")), device=DEVICE))
    assert found[0][1] == {"cpu"}, "the device has not room for all of the state"
