"""Modules, values and objects whose state is more than their own tensors go on from a checkpoint."""

import copy

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.errors import CheckpointError
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.saving.peer_copies import PeerCopies


@pytest.fixture(autouse=True)
def equal_weights(monkeypatch):
    """Simulated ranks draw from one generator."""
    monkeypatch.setattr(
        nn.Linear, "reset_parameters", lambda self: [nn.init.constant_(p, 0.5) for p in self.parameters()]
    )


class Counting(nn.Module):
    """Its extra state is a dict with a tensor, or a tensor of any size."""

    def __init__(self, state):
        super().__init__()
        self.fc, self.state = nn.Linear(4, 4), state

    def forward(self, x):
        return self.fc(x)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize("state", [{"seen": 7, "sums": {"a": torch.ones(2)}}, {}, torch.ones(3), [1, torch.ones(2)], 7])
@pytest.mark.parametrize("strategy", ["*: data", "pipeline"])
def test_extra_state_is_set(tmp_path, state, strategy):
    def program():
        model = wb.parallelize(nn.Sequential(Counting(state), Counting(state)), strategy)
        wb.checkpoint.save(tmp_path / "c", model=model)
        for other in ({"seen": 0}, torch.zeros(5), None):
            again = wb.parallelize(nn.Sequential(Counting(other), Counting(other)), strategy)
            wb.checkpoint.load(tmp_path / "c", model=again)
            torch.testing.assert_close([each.state for each in again], [state, state], rtol=0, atol=0)

    run_ranks(program, 2)


@pytest.mark.parametrize("state", [{"sums": torch.ones(2)}, torch.ones(3)])
def test_extra_state_comes_from_other_ranks(state):
    def program(rank):
        model, there = Counting(state), wb.ones(4, placement=wb.placement.all(), sbp="B")
        copies = PeerCopies({"model": model, "x": there} if rank == 0 else {}, current())
        again = Counting(None)
        assert not copies.compare({"model": again, "x": there})
        copies.restore({"model": again, "x": there}, ["model"])
        torch.testing.assert_close(again.state, state, rtol=0, atol=0)

    run_ranks(program, 2)


class Copying(nn.Module):
    """Its state dictionary has copies, in half of the precision, and a number that is no buffer."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), torch.zeros(())
        self.fc.register_state_dict_post_hook(self._copy)

    def forward(self, x):
        return self.fc(x) * self.scale

    @staticmethod
    def _copy(module, state, prefix, metadata):
        for name in ("weight", "bias"):
            state[prefix + name] = state[prefix + name].detach().half()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "scale"] = self.scale

    def _load_from_state_dict(self, state, prefix, *args):
        self.scale = state.pop(prefix + "scale")


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=3"])
def test_copies_in_a_state_dictionary_are_loaded(tmp_path, strategy):
    made = nn.Sequential(Copying(), nn.Linear(4, 4))
    made[0].scale = torch.tensor(3.0)
    for parameter in made.parameters():
        nn.init.normal_(parameter)

    def program():
        wb.checkpoint.save(tmp_path / "c", model=wb.parallelize(copy.deepcopy(made), strategy))
        model = wb.parallelize(nn.Sequential(Copying(), nn.Linear(4, 4)), strategy)
        wb.checkpoint.load(tmp_path / "c", model=model)
        assert model[0].scale == 3
        return [p.full_tensor() for p in model.parameters()]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found[:2], [p.half().float() for p in made[0].parameters()], rtol=0, atol=0)
        torch.testing.assert_close(found[2:], [*made[1].parameters()], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:parallelize. row '.. model' splits less than half:UserWarning")
@pytest.mark.parametrize("strategy", ["*: data", "*: model"])
def test_weights_are_found_under_their_older_names(tmp_path, strategy):
    """As torch's own ``load_state_dict`` does."""
    older = nn.Sequential(nn.Linear(2, 2))
    nn.init.normal_(older[0].weight)
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(older[0])
    wb.checkpoint.save(tmp_path / "c", model=older)

    def program():
        model = nn.Sequential(nn.Linear(2, 2))
        nn.utils.parametrizations.weight_norm(model[0])
        model = wb.parallelize(model, strategy)
        wb.checkpoint.load(tmp_path / "c", model=model)
        return model(torch.ones(1, 2)).full_tensor()

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, older(torch.ones(1, 2)))


def test_values_are_those_that_were_saved(tmp_path):
    """Their tensors are filled in place, where there is one to fill."""

    def program():
        wb.checkpoint.save(tmp_path / "c", epoch=5, config={"lr": 0.1, "w": torch.ones(2), "all": [torch.ones(1), 3]})
        ours = {"lr": 0.0, "w": torch.zeros(2), "new": 1}
        found = wb.checkpoint.load(tmp_path / "c", epoch=0, config=ours)
        assert found["epoch"] == 5 and found["config"]["lr"] == 0.1 and found["config"]["all"] == [torch.ones(1), 3]
        assert found["config"]["w"] is ours["w"] and bool((ours["w"] == 1).all()) and "new" not in found["config"]
        split = wb.zeros(4, placement=wb.placement.all(), sbp="S(0)")
        wb.checkpoint.save(tmp_path / "s", x=torch.ones(4))
        assert wb.checkpoint.load(tmp_path / "s", x=split)["x"] is split and bool((split == 1).all())

    run_ranks(program, 2)


def test_a_load_into_values_is_a_write_on_all_ranks(tmp_path):
    """Rank 2 holds nothing of ``x``, and keeps its boxing as long as the others."""

    def program():
        x = wb.ones(4, 4, placement=wb.placement(ranks=[0, 1]), sbp="S(0)")
        wb.checkpoint.save(tmp_path / "c", state={"x": x * 2})
        first = x @ x
        wb.checkpoint.load(tmp_path / "c", state={"x": x.detach()})
        return (first + x @ x).full_tensor().sum().item()

    assert run_ranks(program, 3) == [16 * 4 + 16 * 16.0] * 3


@pytest.mark.parametrize("failing", [[0], [0, 1]])
def test_the_rest_stays_as_it_was_where_objects_refuse_their_state(tmp_path, failing):
    class Strict:
        def __init__(self, seed):
            self.seed = seed

        def state_dict(self):
            return {"seed": self.seed}

        def load_state_dict(self, state):
            if state["seed"] != self.seed:
                raise ValueError(f"seed {state['seed']}, not {self.seed}")

    def program(rank):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wb.checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer, loader=Strict(1))
        again = copy.deepcopy(model)
        nn.init.zeros_(again.weight)
        other = torch.optim.SGD(again.parameters(), lr=0.2)
        state = torch.get_rng_state()
        with pytest.raises((ValueError, CheckpointError), match="seed 1, not 2"):
            wb.checkpoint.load(tmp_path / "c", model=again, optimizer=other, loader=Strict(2 if rank in failing else 1))
        assert not again.weight.any() and other.param_groups[0]["lr"] == 0.2
        assert torch.equal(torch.get_rng_state(), state)

    run_ranks(program, 2)


def test_an_optimizer_of_more_parameters_loads_if_not_strict(tmp_path):
    def program():
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        wb.checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer)
        again = nn.ModuleDict({"a": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        parts = {"model": again, "optimizer": torch.optim.Adagrad(again.parameters(), lr=0.1)}
        with pytest.raises(CheckpointError, match=r"2 missing in the checkpoint: head.*(.|\n)*strict=False ignores"):
            wb.checkpoint.load(tmp_path / "c", **parts)
        wb.checkpoint.load(tmp_path / "c", strict=False, **parts)
        state = parts["optimizer"].state
        assert parts["optimizer"].param_groups[0]["lr"] == 0.5
        assert bool((state[again["a"].weight]["sum"] == 1).all()) and not state[again["head"].weight]["sum"].any()
        sum(p.sum() for p in again.parameters()).backward()
        parts["optimizer"].step()
        wide = {"model": nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2)})}
        with pytest.raises(CheckpointError, match="of another shape") as caught:
            wb.checkpoint.load(tmp_path / "c", strict=False, **wide)
        assert "strict=False" not in str(caught.value)

    run_ranks(program, 2)
