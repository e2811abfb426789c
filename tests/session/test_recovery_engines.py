"""Engines are killed in the middle of training, and `recover` lets it go on as if nothing had happened."""

import os
import signal
import time

import pytest

from workbench.errors import CellError, SessionError
from workbench.session import magic_commands

pytestmark = [pytest.mark.engines]

SETUP = """
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.25), torch.nn.ReLU(), torch.nn.Linear(16, 4))
model = wb.parallelize(net, {strategy!r})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
step, own_rank = 0, wb.rank()

class Meter:
    def __init__(self): self.values = []

meter = Meter()
"""
FUNCTIONS = """
import torch.nn.functional as F

def train(num_steps):
    global step
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(8, 8)), torch.arange(8) % 4)
        loss.backward()
        optimizer.step()
        meter.values.append(loss.item())
        step += 1
    assert isinstance(meter, Meter) and own_rank == wb.rank()
    return meter.values
"""


def kill(session, rank):
    """As when the machine runs out of memory; returns when the controller has noticed."""
    (pid,) = session.run("import os; os.getpid()", ranks=[rank]).values
    os.kill(pid, signal.SIGKILL)
    while rank in session._pool.live.registered():
        time.sleep(0.01)


def test_losses_are_those_of_a_run_that_lost_no_rank(own_session, capfd):
    setup = SETUP.format(strategy="*: data")
    own_session.submit(time.sleep, 0.5)
    assert "nothing to recover" in str(own_session.recover())
    assert "this waits its turn" in capfd.readouterr().err
    own_session.run(setup)
    own_session.run(FUNCTIONS)
    expected = own_session.run("train(8)").values[0]

    own_session.run(setup)
    own_session.run("train(5)")
    kill(own_session, 0)
    with pytest.raises(CellError, match=r"rank 0 has no variable train: .* Rank 1 still(.|\n)*%workbench recover"):
        own_session.run("values = train(3)")
    assert "To bring them back: %workbench recover" in capfd.readouterr().err
    with pytest.raises(CellError, match=r"NameError on rank 0: name 'step' is not defined: its engine is new"):
        own_session.run("def show():\n    return step\nshow()")
    with pytest.raises(
        SessionError, match="no cell is marked as set-up, and only cells can make model, net, optimizer"
    ):
        own_session.recover()

    own_session.run(setup, setup=True)  # begins anew; what rank 1 had is kept
    magic_commands.recover(None)
    table = capfd.readouterr().out
    assert "recovered rank 0; 1 set-up cell ran again" in table
    assert "model, net, optimizer" in table and "step = 5" in table
    assert own_session.run("train(3)").values == [expected, expected]


def test_what_was_trained_again_by_hand_comes_back_after_the_next_loss(own_session):
    """No `recover` between the two: rank 1 counted as new for ever, so both ranks kept what they had."""
    setup = SETUP.format(strategy="*: data")
    own_session.run(setup, setup=True)
    kill(own_session, 1)
    own_session.run(setup, setup=True)
    own_session.run(FUNCTIONS)
    own_session.run("train(5)")
    kill(own_session, 0)
    with pytest.raises(CellError, match=r"rank 0 has no variable step"):
        own_session.run("step")
    rows = dict(own_session.recover().rows)
    assert rows["step = 5"] == rows["model"] == rows["optimizer"] == "rank 1"
    weights = own_session.run("step, model[0].weight.to_local().detach().clone()").values
    assert weights[0][0] == weights[1][0] == 5 and (weights[0][1] == weights[1][1]).all()


@pytest.mark.slow  # test_resize_engines reads such a checkpoint, test_recovery has the cell that fails
def test_split_parameters_come_back_from_the_newest_checkpoint(own_session, tmp_path):
    """Rank 1 is lost, and with it half of each parameter. The first time a set-up cell fails."""
    flag = tmp_path / "flag"
    own_session.run(SETUP.format(strategy="*: data | zero=3"), setup=True)
    own_session.run(f"from pathlib import Path\nassert not Path({str(flag)!r}).exists()", setup=True)
    own_session.run(FUNCTIONS, setup=True)
    own_session.run("train(3)")
    own_session.run(
        f"wb.checkpoint.save({str(tmp_path / 'c')!r}, model=model, optimizer=optimizer, step=step, async_op=True)"
    )
    expected = own_session.run("train(3)").values[0]
    kill(own_session, 1)
    flag.touch()
    with pytest.raises(SessionError, match=r"(?s)set-up cell \d of \d failed.*variables back.*AssertionError"):
        own_session.recover()
    assert own_session.run("step", ranks=[0]).values == [6]
    with pytest.raises(CellError, match="rank 1 has no variables step, model: "):
        own_session.run("step, model(torch.randn(8, 8))")
    flag.unlink()
    rows = dict(own_session.recover().rows)
    assert rows["model"] == rows["optimizer"] == rows["step = 3"] == f"checkpoint {tmp_path / 'c'}"
    assert own_session.run("train(3)[-3:]").values == [expected[3:]] * 2


@pytest.mark.slow  # test_recovery has it on simulated ranks
def test_training_of_new_engines_is_kept(own_session):
    """All were replaced, and the user has run the cells again by hand."""
    own_session.run(SETUP.format(strategy="*: data | zero=3"), setup=True)
    own_session.restart()
    own_session.run("from pathlib import Path\n" + SETUP.format(strategy="*: data | zero=3"))
    own_session.run(FUNCTIONS)
    losses = own_session.run("train(3)").values[0]
    with pytest.raises(CellError, match="NameError on ranks 0-1: name 'los' is not defined\n"):
        own_session.run("los[-1]")
    assert dict(own_session.recover().rows)["model"].startswith("kept")
    assert own_session.run("step, meter.values").values == [(3, losses)] * 2
