"""A step of several stages that raises: nothing that it has left under way is taken for a later step's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.processes import run_processes
from workbench.core.options import VIRTUAL_SCHEDULES
from workbench.errors import CollectiveAborted, RunError
from workbench.pipeline.schedules import GENERATORS
from workbench.testing import run_ranks


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))


def strategy(schedule):
    stages = [0, 1, 2, 3] if schedule in VIRTUAL_SCHEDULES else [0, 0, 1, 1]
    layers = "; ".join(f"{layer}: data@{stage}" for layer, stage in zip((0, 2, 4, 5), stages, strict=True))
    return f"{layers} | 2x1x1 mb=4 {schedule}"


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)


def loss_that_raises_in(call):
    calls = []

    def loss(output, target):
        calls.append(isinstance(output, wb.GlobalTensor))  # others are made up: is this loss a mean?
        if calls[-1] and sum(calls) == call:
            raise ZeroDivisionError("no more")
        return F.mse_loss(output, target)

    return loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize("call", [2, 4])
def test_the_next_step_does_not_read_what_a_broken_one_has_left(schedule, call):
    models = [make() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy(schedule))
        with pytest.raises(ZeroDivisionError):
            wb.forward_backward(model, loss_that_raises_in(call), *batch(0))
        wb.forward_backward(model, F.mse_loss, *batch(1))

    with pytest.raises(CollectiveAborted, match=r"2 stages|4 stages"):
        run_ranks(program, 2)


def test_a_first_micro_batch_that_all_refuse_ends_the_world_where_a_rank_has_not_run_all_its_stages():
    """Of such a rank, another stage's forward has not received what was sent to it."""
    models = [make() for _ in range(2)]

    def program(rank, schedule):
        model = wb.parallelize(models[rank], strategy(schedule))
        with pytest.raises(RunError, match="but a loss has 0"):
            wb.forward_backward(model, lambda output, target: output - target, *batch(0))
        return [wb.forward_backward(model, F.mse_loss, *batch(0)).item() for _ in range(2)]

    inputs, targets = batch(0)
    loss = F.mse_loss(make()(inputs), targets).item()
    for found in run_ranks(lambda rank: program(rank, "1f1b"), 2):
        assert found == pytest.approx([loss, loss], rel=1e-5)
    with pytest.raises(CollectiveAborted, match=r"4 stages was interrupted by RunError"):
        run_ranks(lambda rank: program(rank, "interleaved"), 2)


def go_on_after_a_rebuild(schedule):
    model = wb.parallelize(make(), strategy(schedule))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for number in range(4):
        optimizer.zero_grad()
        if number in (1, 2):
            with pytest.raises(ZeroDivisionError):
                wb.forward_backward(model, loss_that_raises_in(number + 2), *batch(0))
            if number == 1:  # reading is an exchange, too
                with pytest.raises(CollectiveAborted, match=r"interrupted by ZeroDivisionError.*wb\.rebuild"):
                    wb.barrier()
            wb.rebuild()
            optimizer.zero_grad()
        losses.append(wb.forward_backward(model, F.mse_loss, *batch(number)).item())
        optimizer.step()
    return losses


@pytest.mark.procs
@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_after_a_rebuild_training_goes_on_with_the_losses_of_one_device(schedule):
    model, losses = make(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(4):
        optimizer.zero_grad()
        inputs, targets = batch(number)
        parts = [F.mse_loss(model(x), y) / 4 for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True)]
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(parts).item())
    for found in run_processes(go_on_after_a_rebuild, 2, schedule):
        assert found == pytest.approx(losses, rel=1e-5)
