"""Optimizers whose state has lists and dictionaries of tensors go on from a checkpoint."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import workbench as wb
from tests.training.saving.test_saving import Run, on
from workbench.errors import CheckpointError
from workbench.testing import run_ranks


def test_the_history_of_lbfgs_goes_on(tmp_path):
    """Its state has lists of tensors, one of them with None in places, and a gradient whose terms are summed first."""
    x, y = torch.randn(12, 4), torch.randn(12, 3)
    made = nn.Linear(4, 3).state_dict()

    def begin():
        model = nn.Linear(4, 3)
        model.load_state_dict(made)
        wb.parallelize(model, "*: data")
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)

    def train(model, optimizer, num_steps):
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(num_steps)]

    def before():
        model, optimizer = begin()
        losses = train(model, optimizer, 2)
        wb.checkpoint.save(tmp_path / "ckpt", model=model, optimizer=optimizer)
        return losses

    def after():
        model, optimizer = begin()
        train(model, optimizer, 1)
        wb.checkpoint.load(tmp_path / "ckpt", model=model, optimizer=optimizer)
        return train(model, optimizer, 2)

    losses = on(2, before) + on(2, after)
    assert losses == pytest.approx(on(1, lambda: train(*begin(), 4)), abs=1e-6)


class Averaging(torch.optim.Optimizer):
    """Its state is a list with a gradient of each of the newest steps, and a dictionary with their sum."""

    def __init__(self, params, elementwise):
        super().__init__(params, {"lr": 0.1})
        self.elementwise = elementwise

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            newest = state.setdefault("newest", [])
            newest.append(parameter.grad.clone())
            sums = state.setdefault("sums", {"all": torch.zeros_like(parameter)})
            sums["all"] = sums["all"] + parameter.grad
            parameter -= self.param_groups[0]["lr"] * (newest[-1] - newest[0] + sums["all"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("model", "data"), ("pipeline", "model")])
def test_state_in_lists_and_dictionaries_goes_on(tmp_path, elementwise, saved_by, loaded_by):
    def run_with(strategy):
        run = Run(strategy)
        run.optimizer = Averaging(run.model.parameters(), elementwise)
        run.scheduler = torch.optim.lr_scheduler.ConstantLR(run.optimizer)
        return run

    def before():
        run = run_with(saved_by)
        losses = run.train(0, 2)
        wb.checkpoint.save(tmp_path / "ckpt", model=run.model, optimizer=run.optimizer)
        return losses

    def after():
        run = run_with(loaded_by)
        wb.checkpoint.load(tmp_path / "ckpt", model=run.model, optimizer=run.optimizer)
        return run.train(2, 4)

    losses = on(2, before) + on(2, after)
    truth = on(1, lambda: run_with("data").train(0, 4))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(truth), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("saved", "ours", "said"),
    [
        ((4, 2), (5, 2), r"table\.0 is \(4, 2\) in the checkpoint, \(5, 2\) in the value"),
        ((8,), (2, 4), r"table\.0 is \(8,\) in the checkpoint, \(2, 4\) in the value"),
        (None, (5, 2), "table: 1 missing in the checkpoint: table.0"),
    ],
)
def test_tensors_of_another_shape_are_refused(tmp_path, saved, ours, said):
    """Global tensors and plain ones, in lists too. Rows were filled as far as they fit."""

    def program():
        for tensor in (torch.ones(ours), wb.ones(*ours, placement=wb.placement.all("cpu"), sbp="S(0)")):
            wb.checkpoint.save(tmp_path / "c", table=[torch.zeros(saved)] if saved else [1.0])
            with pytest.raises(CheckpointError, match=rf"{said}(.|\n)*Nothing was loaded"):
                wb.checkpoint.load(tmp_path / "c", table=[tensor])
            assert bool((tensor == 1).all())

    run_ranks(program, 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_file_of_torch_without_names_in_groups_says_what_to_save(tmp_path, is_flat):
    """Numbers of parameters were a TypeError inside."""
    model, empty = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options) if is_flat else optimizer.state_dict()
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    found = "no groups" if is_flat else "numbers"

    def program():
        own = wb.parallelize(copy.deepcopy(empty), "*: data")
        with pytest.raises(CheckpointError, match=rf"has {found} in place of names.*get_optimizer_state_dict\("):
            wb.checkpoint.load(tmp_path, model=own, optimizer=torch.optim.AdamW(own.parameters()), strict=is_flat)
        wb.checkpoint.load(tmp_path, model=own)
        return torch.equal(own.weight.full_tensor(), model.weight)

    assert run_ranks(program, 2) == [True, True]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_dict_is_filled_from_other_names(tmp_path):
    """Files of torch without a name for the model, with a nested one, or with the prefix of DistributedDataParallel."""
    model, empty = nn.Linear(2, 2), nn.Linear(2, 2)
    forms = {
        "top": lambda state: state,
        "nested": lambda state: {"app": {"model": state}},
        "prefix": lambda state: {"model": {f"module.{name}": value for name, value in state.items()}},
    }
    for name, form in forms.items():
        dcp.save(form(model.state_dict()), checkpoint_id=tmp_path / name, no_dist=True)

    def program():
        for name, form in forms.items():
            own = wb.parallelize(copy.deepcopy(empty), "*: data | zero=3")
            wb.checkpoint.load(tmp_path / name, **form(own.state_dict()))
            assert torch.equal(own.weight.full_tensor(), model.weight)

    run_ranks(program, 2)
