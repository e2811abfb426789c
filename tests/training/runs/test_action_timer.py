"""The timeline of a loop of a user's own: forwards, backwards and optimizers' steps, on simulated ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn, ones, optim

import workbench as wb
from workbench.core.metrics import ActionSpan, StepSpans
from workbench.testing import run_ranks
from workbench.training.runs import step_metrics, user_loops

PLAIN = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def received(monkeypatch):
    monkeypatch.setattr(step_metrics, "INTERVAL_S", 0.0)  # every step is reported
    monkeypatch.setattr(user_loops, "_SPANS_INTERVAL_S", 0.0)
    messages: list[object] = []
    user_loops.listen(messages.append)
    yield messages
    user_loops.listen(None)


def train(
    step: Callable[[nn.Module, optim.Optimizer], object],
    strategy: str = "*: data",
    num_steps: int = 3,
    num_ranks: int = 2,
) -> None:
    def program():
        model = wb.parallelize(copy.deepcopy(PLAIN), strategy)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(num_steps):
            wb.log(loss=step(model, optimizer), samples=4)

    run_ranks(program, num_ranks)


def plain_step(model: nn.Module, optimizer: optim.Optimizer) -> torch.Tensor:
    loss = F.mse_loss(model(ones(4, 4)), ones(4, 2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def timelines(messages: list[object], step: int) -> dict[int, tuple[ActionSpan, ...]]:
    return {m.rank: m.spans for m in messages if isinstance(m, StepSpans) and m.step == step}


def names(spans: tuple[ActionSpan, ...]) -> str:
    return " ".join(f"{span.stage}{span.kind}{span.micro_batch}" for span in spans)


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=3"])
def test_a_plain_loop_has_forward_backward_and_step(received, strategy):
    train(plain_step, strategy)
    found = timelines(received, 2)
    assert {rank: names(spans) for rank, spans in found.items()} == {0: "0F0 0B0 0O0", 1: "0F0 0B0 0O0"}
    for forward, backward, step in found.values():
        assert forward.start_s < forward.stop_s <= backward.start_s < backward.stop_s <= step.start_s < step.stop_s
        assert sum(span.num_exchanges for span in (forward, backward, step)) > 0


def test_a_forward_lasts_until_its_backward_so_the_loss_is_in_it(received):
    """The layers exchange nothing under data parallelism."""

    def step(model, optimizer):
        loss = F.mse_loss(model(ones(4, 4)).to_global(sbp=wb.sbp.broadcast), ones(4, 2))
        loss.backward()
        optimizer.step()
        return loss

    train(step)
    forward, backward, _ = timelines(received, 2)[0]
    assert forward.stop_s == backward.start_s and forward.num_exchanges == 1


def test_stages_of_a_plain_loop(received):
    train(plain_step, "0: data; 2: data@1 | 2x1x1")
    assert [names(spans) for _, spans in sorted(timelines(received, 2).items())] == ["0F0 0B0 0O0", "1F0 1B0 1O0"]


def test_stages_that_are_grids_of_ranks(received):
    train(plain_step, "0: data; 2: model@1 | 2x2x2", num_ranks=8)
    found = [names(spans) for _, spans in sorted(timelines(received, 2).items())]
    assert found == ["0F0 0B0 0O0"] * 4 + ["1F0 1B0 1O0"] * 4


def test_accumulated_gradients_are_micro_batches(received):
    def step(model, optimizer):
        for _ in range(3):
            loss = F.mse_loss(model(ones(4, 4)), ones(4, 2))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(step)
    assert names(timelines(received, 1)[1]) == "0F0 0B0 0F1 0B1 0F2 0B2 0O0"


def test_a_scheduled_step_has_the_optimizers_step_too(received):
    def step(model, optimizer):
        optimizer.zero_grad()
        loss = wb.forward_backward(model, F.mse_loss, ones(4, 4), ones(4, 2))
        optimizer.step()
        return loss

    train(step, "0: data; 2: data@1 | 2x1x1 mb=2")
    assert names(timelines(received, 2)[1]) == "1F0 1B0 1F1 1B1 1O0"


def test_what_a_step_does_without_gradients_is_no_forward(received):
    def step(model, optimizer):
        with torch.no_grad():
            model(ones(2, 4))
        wb.evaluate(model, ones(4, 4))
        return plain_step(model, optimizer)

    train(step)
    assert names(timelines(received, 2)[0]) == "0F0 0B0 0O0"


def test_a_teacher_inside_a_student_ends_no_forward(received):
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.teacher = copy.deepcopy(PLAIN), copy.deepcopy(PLAIN)

        def forward(self, x):
            with torch.no_grad():
                wanted = self.teacher(x)
            return F.mse_loss(self.own(x), wanted + 1)

    def program():
        student = Student()
        wb.parallelize(student.teacher, "*: data")
        wb.parallelize(student.own, "*: data")
        optimizer = optim.SGD(student.own.parameters(), lr=0.1)
        for _ in range(3):
            student(ones(4, 4)).backward()
            optimizer.step()
            wb.log(samples=4)

    run_ranks(program)
    assert names(timelines(received, 2)[0]) == "0F0 0B0 0O0"


def test_a_step_that_failed_is_forgotten(received):
    def step(model, optimizer):
        def fails(grad):
            raise ZeroDivisionError

        model[1].register_forward_hook(lambda m, a, output: output.register_hook(fails) and None)
        with pytest.raises(ZeroDivisionError):
            model(ones(4, 4)).sum().backward()
        model[1]._forward_hooks.popitem()
        return plain_step(model, optimizer)

    train(step)
    assert names(timelines(received, 2)[0]) == "0F0 0B0 0F1 0B1 0O0"


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
def test_a_closure_is_in_the_optimizers_step_of_lbfgs(received):
    def program():
        model = wb.parallelize(copy.deepcopy(PLAIN), "*: data")
        optimizer = optim.LBFGS(model.parameters(), max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(ones(4, 4)), ones(4, 2))
            loss.backward()
            return loss

        for _ in range(2):
            wb.log(loss=optimizer.step(closure), samples=4)

    run_ranks(program)
    assert names(timelines(received, 1)[0]) == "0O0"


def test_nothing_is_timed_where_nobody_reports(received):
    def program():
        model = wb.parallelize(copy.deepcopy(PLAIN), "*: data")
        plain_step(model, optim.SGD(model.parameters(), lr=0.1))
        world = user_loops.current()
        before = world.context.action_timer
        wb.log(loss=1.0)
        user_loops._loops[world].end(user_loops._listener)  # the cell ends
        return before, world.context.action_timer

    assert run_ranks(program) == [(None, None)] * 2
