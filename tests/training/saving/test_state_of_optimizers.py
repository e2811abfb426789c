"""The state of an optimizer in another dtype, and what it keeps beside the state of parameters."""

import copy

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.errors import CheckpointError
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.saving.peer_copies import PeerCopies

_MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def trained(make, strategy=None, dtype=torch.float32, num_steps=1):
    model = copy.deepcopy(_MODEL).to(dtype)
    model = wb.parallelize(model, strategy) if strategy else model
    optimizer = make(model.parameters())
    for _ in range(num_steps):
        model(torch.ones(4, 4, dtype=dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", [None, "*: data", "*: model", "*: data | zero=1", "pipeline"])
@pytest.mark.parametrize(("saved", "ours"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_state_takes_the_dtype_of_its_parameter(tmp_path, strategy, saved, ours, make):
    """As in torch, which leaves steps in 32 bits."""

    def program():
        model, optimizer = trained(make, strategy, saved)
        wb.checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer)
        again, other = trained(make, strategy, ours, num_steps=0)
        wb.checkpoint.load(tmp_path / "c", model=again, optimizer=other)
        assert other.state
        for state in other.state.values():
            for key, value in state.items():
                assert value.dtype == (torch.float32 if key == "step" else ours), key
        again(torch.ones(4, 4, dtype=ours)).sum().backward()
        other.step()

    run_ranks(program, 2)


def test_steps_that_kernels_read_are_in_32_bits(tmp_path):
    model, optimizer = trained(torch.optim.AdamW, dtype=torch.float64)
    for state in optimizer.state.values():
        state["step"] = state["step"].double()
    wb.checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.param_groups[0]["fused"] = True
    wb.checkpoint.save(tmp_path / "fused", model=model, optimizer=optimizer)
    wb.checkpoint.load(tmp_path / "fused", model=model, optimizer=fused)
    assert {state["step"].dtype for state in fused.state.values()} == {torch.float32}
    wb.checkpoint.load(tmp_path / "c", model=model, optimizer=optimizer)
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float64}


class Precise(torch.optim.Optimizer):
    """It keeps moments in 32 bits of parameters in 16."""

    elementwise = True

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["sum"] = parameter.grad.float() / 3


@pytest.mark.parametrize("strategy", [None, "*: model"])
def test_state_in_a_dtype_of_its_own_keeps_it(tmp_path, strategy):
    def program():
        model, optimizer = trained(Precise, strategy, torch.bfloat16)
        wb.checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer)
        again, other = trained(Precise, strategy, torch.bfloat16, num_steps=0)
        wb.checkpoint.load(tmp_path / "c", model=again, optimizer=other)
        pairs = zip(optimizer.state.values(), other.state.values(), strict=True)
        assert all(torch.equal(a["sum"], b["sum"]) and b["sum"].dtype == torch.float32 for a, b in pairs)

    run_ranks(program, 2)


class Counting(torch.optim.SGD):
    """It counts in its state, beside the state of parameters, and in an entry of its state dictionary."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.num_steps, self.scales = 0, torch.zeros(2)

    def step(self, closure=None):
        self.state["norms"] = {"all": [1.5], 2: self.state.get("norms", {2: 0})[2] + 1}
        self.num_steps += 1
        self.scales = self.scales + 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "num_steps": self.num_steps, "scales": self.scales}

    def load_state_dict(self, state):
        self.num_steps, self.scales = state["num_steps"], state["scales"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Around(torch.optim.Optimizer):
    """It steps another one."""

    def __init__(self, params):
        self.inner = Counting(params)
        super().__init__(self.inner.param_groups, {})

    def step(self):
        self.inner.step()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", [None, "*: model", "*: data | zero=1", "pipeline"])
@pytest.mark.parametrize("make", [Counting, Around])
@pytest.mark.parametrize("by_peers", [False, True])
def test_state_that_is_of_no_parameter_goes_on(tmp_path, strategy, make, by_peers):
    def program():
        model, optimizer = trained(make, strategy, num_steps=3)
        again, other = trained(make, strategy)
        if by_peers:
            copies = PeerCopies({"model": model, "optimizer": optimizer}, current())
            assert not copies.compare({"model": again, "optimizer": other})
            copies.restore({"model": again, "optimizer": other}, ["model", "optimizer"])
        else:
            wb.checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer)
            wb.checkpoint.load(tmp_path / "c", model=again, optimizer=other)
        found, truth = getattr(other, "inner", other), getattr(optimizer, "inner", optimizer)
        assert found.num_steps == 3 and torch.equal(found.scales, torch.full((2,), 3.0))
        assert found.state["norms"] == {"all": [1.5], 2: 3}
        buffers = [
            [
                each.state[p]["momentum_buffer"]
                for group in each.param_groups
                for p in group["params"]
                if p in each.state
            ]
            for each in (found, truth)
        ]
        assert buffers[0] and all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))

    run_ranks(program, 2)


def test_tensors_of_one_rank_beside_the_state_are_refused(tmp_path):
    def program(rank):
        model, optimizer = trained(Counting, "*: model")
        optimizer.scales = torch.randn(5, generator=torch.Generator().manual_seed(rank))
        with pytest.raises(CheckpointError, match=r"optimizer\.own has other plain tensors on rank 0 than on rank 1"):
            wb.checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer)
        optimizer.scales = [*model.parameters()]
        with pytest.raises(CheckpointError, match=r"optimizer: Counting keeps global tensors under 'scales'"):
            wb.checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer)

    run_ranks(program, 2)


@pytest.mark.parametrize("strategy", [None, "*: model"])
@pytest.mark.parametrize(("has_more", "by_peers"), [("saved", False), ("saved", True), ("ours", True)])
def test_state_is_found_with_other_modules_beside_it(tmp_path, strategy, has_more, by_peers):
    """Names of parameters begin with that of their module where several are saved together."""

    def program():
        model, optimizer = trained(torch.optim.AdamW, strategy)
        again, other = trained(torch.optim.AdamW, strategy, num_steps=0)
        saved, ours = {"model": model, "optimizer": optimizer}, {"model": again, "optimizer": other}
        more = {"average": copy.deepcopy(_MODEL)}
        if by_peers:
            copies = PeerCopies(saved | (more if has_more == "saved" else {}), current())
            assert not copies.compare(ours)
            copies.restore(ours | (more if has_more == "ours" else {}), ["model", "optimizer"])
        else:
            wb.checkpoint.save(tmp_path / "c", **saved, **more)
            wb.checkpoint.load(tmp_path / "c", **ours)
        for truth, found in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(optimizer.state[truth]["exp_avg"], other.state[found]["exp_avg"])

    run_ranks(program, 2)


@pytest.mark.parametrize("strategy", [None, "*: model"])
def test_state_of_another_class_is_refused(tmp_path, strategy):
    """Its step would miss moments, or go on as the other class: the settings come with the state."""

    def program():
        model, optimizer = trained(Around, strategy)
        wb.checkpoint.save(tmp_path / "around", model=model, optimizer=optimizer)
        wb.checkpoint.save(tmp_path / "inner", model=model, optimizer=optimizer.inner)
        adam = torch.optim.AdamW(model.parameters())
        with pytest.raises(CheckpointError, match=r"optimizer: Counting in the checkpoint, AdamW in the optimizer\n"):
            wb.checkpoint.load(tmp_path / "inner", model=model, optimizer=adam)
        optimizer.inner = torch.optim.AdamW(optimizer.param_groups)
        with pytest.raises(CheckpointError, match=r"optimizer, its AdamW: Counting in the checkpoint, AdamW in"):
            wb.checkpoint.load(tmp_path / "around", model=model, optimizer=optimizer)
        wb.checkpoint.save(tmp_path / "adam", model=model, optimizer=torch.optim.Adam(model.parameters()))
        with pytest.raises(CheckpointError, match=r": Adam in the checkpoint, AdamW in(.|\n)*strict=False .*classes"):
            wb.checkpoint.load(tmp_path / "adam", model=model, optimizer=adam)
        wb.checkpoint.load(tmp_path / "adam", strict=False, model=model, optimizer=adam)

    run_ranks(program, 2)


def test_a_scheduler_of_another_class_is_refused(tmp_path):
    """Its rates would be those of the other one, for torch's schedulers take any attributes as their state."""
    model, optimizer = trained(torch.optim.AdamW)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    wb.checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer, scheduler=cosine)
    step = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    with pytest.raises(CheckpointError, match=r": CosineAnnealingLR in the checkpoint, StepLR in(.|\n)*strict"):
        wb.checkpoint.load(tmp_path / "c", model=model, optimizer=optimizer, scheduler=step)
    assert not hasattr(step, "T_max")
    wb.checkpoint.load(tmp_path / "c", model=model, optimizer=optimizer, scheduler=cosine)
    wb.checkpoint.load(tmp_path / "c", strict=False, model=model, optimizer=optimizer, scheduler=step)
    assert step.T_max == 10


@pytest.mark.parametrize(("more", "alone"), [({}, "net"), ({"average": _MODEL}, "model")])
def test_state_of_a_module_under_two_names_is_found_by_either(tmp_path, more, alone):
    """By the first of them, where another module is beside it."""
    model, optimizer = trained(torch.optim.AdamW)
    wb.checkpoint.save(tmp_path / "c", model=model, net=model, **more, optimizer=optimizer)
    for names in (["model"], [alone], ["net", "model"]):
        again, other = trained(torch.optim.AdamW, num_steps=0)
        wb.checkpoint.load(tmp_path / "c", **dict.fromkeys(names, again), optimizer=other)
        for truth, found in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(optimizer.state[truth]["exp_avg"], other.state[found]["exp_avg"])


def test_names_of_state_are_those_of_one_form(tmp_path):
    """Some names are both: of a module within the module, and of a parameter behind the name of its module."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.model = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def made():
        model = Nested()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    for more in ({}, {"average": Nested()}):
        saved, ours = made(), made()
        sum(number * p.sum() for number, p in enumerate(saved["model"].parameters())).backward()
        saved["optimizer"].step()
        wb.checkpoint.save(tmp_path / "c", **saved, **more)
        wb.checkpoint.load(tmp_path / "c", **ours)
        for number, parameter in enumerate(ours["model"].parameters()):
            assert bool((ours["optimizer"].state[parameter]["momentum_buffer"] == number).all())


@pytest.mark.parametrize("strategy", [None, "*: model"])
def test_groups_are_found_in_another_order(tmp_path, strategy):
    def program():
        def by_dims(dims):
            model = copy.deepcopy(_MODEL)
            model = wb.parallelize(model, strategy) if strategy else model
            groups = [{"params": [p for p in model.parameters() if p.dim() == d], "lr": d / 10} for d in dims]
            return {"model": model, "optimizer": torch.optim.SGD(groups)}

        wb.checkpoint.save(tmp_path / "c", **by_dims([1, 2]))
        for is_strict in (True, False):
            other = by_dims([2, 1])
            for group in other["optimizer"].param_groups:
                group["lr"] = 0
            wb.checkpoint.load(tmp_path / "c", strict=is_strict, **other)
            assert [group["lr"] for group in other["optimizer"].param_groups] == [0.2, 0.1]

    run_ranks(program, 2)


def test_a_rate_that_is_a_tensor_comes_from_other_ranks():
    def program():
        model, optimizer = trained(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.5)))
        again, other = trained(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)), num_steps=0)
        ours = {"model": again, "optimizer": other}
        copies = PeerCopies({"model": model, "optimizer": optimizer}, current())
        assert not copies.compare(ours)
        copies.restore(ours, [*ours])
        assert other.param_groups[0]["lr"] == 0.5

    run_ranks(program, 2)
