"""``wb.log`` in training loops of one's own, on simulated ranks."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from torch import nn, ones, optim

import workbench as wb
from workbench.core.metrics import StepBlock, StepSpans
from workbench.runtime.runs import collecting, own_loops
from workbench.testing import run_ranks


@pytest.fixture
def heard(monkeypatch):
    monkeypatch.setattr(collecting, "INTERVAL_S", 0.0)  # every step is exchanged by itself
    messages: list[object] = []
    own_loops.listen(messages.append)
    yield messages
    own_loops.listen(None)


def blocks(messages) -> list[StepBlock]:
    return [message for message in messages if isinstance(message, StepBlock)]


def test_steps_losses_and_samples_are_reported(heard):
    def program():
        placement = wb.placement("cpu", ranks=[0, 1])
        for step in range(3):
            loss = wb.ones(4, placement=placement, sbp=wb.sbp.split(0)).sum() * (step + 1)
            wb.log(loss=loss, samples=64)

    run_ranks(program)
    found = blocks(heard)
    assert [loss for block in found for loss in block.losses] == [4.0, 8.0, 12.0]
    assert [block.first_step for block in found] == [0, 1, 2] and found[0].samples == (64,)
    assert found[0].step_times_s == (0.0,) and found[1].step_times_s[0] > 0, "the first call starts the clock"
    assert found[0].num_ranks == 2 and found[0].memory_bytes[0]["peak"] >= 0


def test_a_model_gives_memory_by_kind_and_its_timeline(heard):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def program():
        model = wb.parallelize(copy.deepcopy(plain), "0: data; 1: data@1 | 2x1x1 mb=2")
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = wb.forward_backward(model, F.mse_loss, ones(4, 4), ones(4, 2))
            optimizer.step()
            wb.log(loss=loss, samples=4, model=model, optimizer=optimizer)

    run_ranks(program)
    memory = blocks(heard)[-1].memory_bytes
    assert [kinds["parameters"] for kinds in memory] == [80, 40] and memory[0]["optimizer"] == 80
    spans = {message.rank: message for message in heard if isinstance(message, StepSpans) and message.step == 0}
    assert set(spans) == {0, 1} and [span.kind for span in spans[0].spans] == ["F", "F", "B", "B"]


def test_another_cell_begins_another_loop(heard):
    cell = [1]
    own_loops.listen(heard.append, lambda: cell[0])

    def program():
        wb.log(loss=1.0)
        wb.barrier()
        cell[0] = 2
        wb.barrier()
        wb.log(loss=2.0)

    run_ranks(program)
    assert [block.first_step for block in blocks(heard)] == [0, 0]


def test_where_nobody_listens_nothing_happens():
    assert set(run_ranks(lambda: wb.log(loss=1.0, samples=2))) == {None}
