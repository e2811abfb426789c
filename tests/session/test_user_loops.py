"""Loops of one's own in cells of real engines: the live view has their last steps, however the cell ends."""

import pytest

import workbench as wb
from workbench.errors import CellError

pytestmark = pytest.mark.engines

LOOP = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
model = wb.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), "0: data; 1: data@1 | 2x1x1 mb=2")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.ones(8, 4), torch.ones(8, 2)
losses = []
for step in range(40):
    optimizer.zero_grad()
    loss = wb.forward_backward(model, F.mse_loss, x, y)
    optimizer.step()
    losses.append(loss.item())
    wb.log(loss=loss, samples=8, model=model, optimizer=optimizer)
    wb.evaluate(model, x)
"""


@pytest.fixture
def view(session):
    made = wb.LiveView(session)
    yield made
    made.close()


def assert_all_of_it(view, session, num_steps=40):
    history = view.live.history
    assert history.last_step == num_steps
    assert history.latest_loss == pytest.approx(session.pull("losses", ranks=[0])[0][-1], rel=1e-6)
    assert history.timeline[0].step == num_steps - 1 and len(history.timeline) == 2
    assert f"step {num_steps}" in view.live.status.state.value
    assert [kinds["parameters"] for kinds in history.memory_by_kind] == [160, 72]


def test_the_last_steps_of_a_loop_are_shown(session, view):
    session.run(LOOP)
    assert_all_of_it(view, session)
    session.run(LOOP)
    assert_all_of_it(view, session)
    assert "own loop 2" in view.live.title.value


def test_they_are_also_shown_when_the_loop_fails(session, view):
    with pytest.raises(CellError, match="ZeroDivisionError"):
        session.run(LOOP + "    if step == 29: 1 / 0\n")
    assert_all_of_it(view, session, 30)


@pytest.mark.slow
def test_and_when_one_rank_fails_or_the_cell_takes_too_long(session, view):
    with pytest.raises(CellError, match="ZeroDivisionError on rank 1"):
        session.run(LOOP + "    if step == 29 and wb.rank() == 1: 1 / 0\n")
    assert view.live.history.last_step == 30
    with pytest.raises(CellError, match="Timeout"):
        session.run(LOOP + "    if step == 29:\n        import time; time.sleep(60)\n", timeout=20)
    assert view.live.history.last_step == 30


@pytest.mark.slow
def test_two_loops_in_one_cell(session, view):
    session.run(LOOP + LOOP.replace("range(40)", "range(7)"))
    assert_all_of_it(view, session, 7)
    assert "own loop 2" in view.live.title.value
