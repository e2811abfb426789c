"""A running session gets more engines and fewer, and training goes on with the numbers of a run that kept its size."""

import os
import signal

import pytest
from IPython.core.error import UsageError

from tests.timeouts import wait_until
from workbench.errors import CellError, SessionError
from workbench.session import magic_commands
from workbench.session.recovery import SetupCells

pytestmark = [pytest.mark.engines]

SETUP = """
import torch.nn.functional as F
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
model = wb.parallelize(net, "*: data | zero=1")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
step, own_rank = 0, wb.rank()

def train(num_steps):
    global step
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(batch), torch.arange(8) % 4)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        step += 1
    assert own_rank == wb.rank()
    return losses
"""


def trained(session):
    values = session.run("train(3)").values
    assert len(values) == session.num_engines and all(each == values[0] for each in values)
    return values[0]


def test_a_session_grows_and_shrinks_while_a_model_is_trained(own_session, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # engines stay in the folder of the session's start
    own_session.run(SETUP)
    expected = trained(own_session) + trained(own_session) + trained(own_session)
    pids = own_session.run("import os\nos.getpid()").values

    own_session.run(SETUP)
    losses = trained(own_session)
    own_session.run("everywhere = wb.arange(8, placement=wb.placement.all('cpu'), sbp='S(0)')\nrandom = torch.rand(2)")
    report = own_session.resize(3)  # no cell is marked as set-up
    assert "rank 2 has no variables. To get them" in str(report)
    assert len({str(tmp_path), *(folders := own_session.run("import os\nos.getcwd()").values)}) == 2, folders
    with pytest.raises(CellError, match=r"rank 2 has no variable train.*Nothing ran"):
        own_session.run("train(3)")
    with pytest.raises(SessionError, match="no cell is marked as set-up"):
        own_session.recover()
    own_session.run(SETUP, setup=True)
    assert dict(own_session.recover().rows)["model"].startswith("rank")
    losses += trained(own_session)

    magic_commands.resize(type("Options", (), {"number": 4})())
    assert "recovered rank 3; 1 set-up cell ran again" in capfd.readouterr().out
    assert own_session.run("wb.world_size(), own_rank, wb.rank()").values == [(4, rank, rank) for rank in range(4)]
    own_session.run("wide = wb.arange(8, placement=wb.placement.all('cpu'), sbp='S(0)')")
    rows = dict(own_session.resize(2).rows)
    assert rows["model"] == "under *: data | zero=1" and "wide" in rows
    losses += trained(own_session)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert own_session.run("import os\nos.getpid()").values == pids, "these engines have never ended"
    assert own_session.pull("wide").tolist() == own_session.pull("everywhere").tolist() == list(range(8))
    assert [each.alive for each in own_session.status()] == [True, True]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    of_launcher = own_session.run(f"[os.environ[name] for name in {names}]").values
    assert of_launcher == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    assert repr(own_session) == "<Session: 2 engines on cpu>" and own_session.run("1").values == [1, 1]


@pytest.mark.slow  # test_lost_engines has a death, and the test above a smaller session
def test_dead_engines_are_given_back_without_new_ones(own_session, tmp_path):
    """What lay there alone comes from the checkpoint."""
    own_session.run(SETUP, setup=True)
    own_session.resize(3)
    own_session.run("wb.parallelize(model, '*: data | zero=3', optimizer=optimizer)")
    own_session.run(f"wb.checkpoint.save({str(tmp_path / 'c')!r}, model=model, optimizer=optimizer, step=step)")
    expected = own_session.run("train(2)").values[0]
    (pid,) = own_session.run("import os\nos.getpid()", ranks=[2]).values
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: 2 not in own_session._pool.live.registered(), "the death of the engine")
    report = own_session.resize(2)
    assert dict(report.recovered.rows)["model"] == f"checkpoint {tmp_path / 'c'}", report
    assert own_session.run("train(2)").values == [pytest.approx(expected, rel=1e-4)] * 2


def test_numbers_that_cannot_be(own_session):
    with pytest.raises(SessionError, match=r"resize\(0\): a session has 1 or more engines"):
        own_session.resize(0)
    with pytest.raises(UsageError, match="how many"):
        magic_commands.resize(type("Options", (), {"number": None})())
    assert own_session.num_engines == 2


@pytest.mark.slow
def test_an_engine_that_is_lost_while_others_start_is_named(own_session, monkeypatch, capfd):
    processes = own_session._pool._processes
    start_engines, started = processes.start_engines, []

    def start(client, ranks, on_progress):
        ids = start_engines(client, ranks, on_progress)
        started.append(list(ranks))
        if len(started) <= 2:  # rank 0 dies while rank 2 starts, and rank 2 while rank 0 does
            dying = (0, 2)[len(started) - 1]
            processes.kill([dying])
            wait_until(lambda: dying not in own_session._pool.live.registered(), "the death of the engine")
        return ids

    own_session._setup = SetupCells()
    own_session.run(
        "kept = 5\nfor name in ('net', 'model', 'optimizer'): globals().pop(name, None)"
    )  # no cell makes them
    monkeypatch.setattr(processes, "start_engines", start)
    report = own_session.resize(3)
    assert started == [[2], [0], [2]]
    told = capfd.readouterr().err
    assert "rank 0 died (killed by SIGKILL)" in told and "rank 2 died (killed by SIGKILL)" in told
    assert "ranks 0,2 have no variables. To get them" in str(report)
    assert own_session.run("globals().get('kept')").values == [None, 5, None]

    with pytest.raises(SessionError, match=r"resize\(1\): rank 1, .*still has variables .*kept"):
        own_session.resize(1)
    own_session.run("made = 1", setup=True)
    report = own_session.resize(1)
    assert "recovered ranks 0,2" in str(report) and own_session.run("kept").values == [5]


def test_an_interrupted_resize_adds_nothing(own_session, monkeypatch):
    def wait_for(client, ranks, on_progress):
        started.append(processes.engines[ranks[0]])
        raise KeyboardInterrupt

    processes, started, before = own_session._pool._processes, [], own_session.num_engines
    monkeypatch.setattr(processes, "_wait_for", wait_for)
    with pytest.raises(KeyboardInterrupt, match="The session is as it was"):
        own_session.resize(before + 1)
    assert len(processes.pids()) == processes.num_ranks == before
    wait_until(lambda: not started[0].is_running() or started[0].status() == "zombie", "the end of the new engine")
    assert own_session.num_engines == before and own_session.run("wb.world_size()").values == [before] * before
