"""Panels and comparisons of engines that are others by now: restarted, lost."""

import os
import signal

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.timeouts import WAIT_TIMEOUT_S, wait_until
from workbench.core.strategy import Strategy
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject
from workbench.ui.panel import Panel

pytestmark = [pytest.mark.engines]


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(50, 8, generator=generator), torch.randint(0, 4, (50,), generator=generator)


@pytest.fixture(scope="module")
def panel(own_session):
    panel = Panel(make_model, data(), F.cross_entropy, batch_size=16, steps=6, keep=False, session=own_session)
    yield panel
    panel.close()


@pytest.fixture(scope="module")
def comparison(own_session):
    with Comparison(own_session, Subject.of(make_model, data(), F.cross_entropy, batch_size=16, steps=6)) as comparison:
        yield comparison


def assert_runs(panel, comparison):
    """A run of each, checked against one device."""
    num_runs = len(panel.runs)
    panel.run()
    assert panel.wait(WAIT_TIMEOUT_S)
    assert panel.error is None, panel.error
    assert len(panel.runs) == num_runs + 1 and panel.runs[-1].equal is True
    record = comparison.start(Strategy("*: model")).result()
    assert record.equal is True and record.weight_difference is not None


def kill(session, rank):
    """As when the machine runs out of memory; the panel has had no notice. With torch for CUDA it takes a moment."""
    (pid,) = session.run("import os; os.getpid()", ranks=[rank]).values
    engine = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(engine), "the end of the engine")


def has_ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_after_a_restart_the_job_is_sent_again(own_session, panel, comparison):
    assert_runs(panel, comparison)
    own_session.restart()
    assert_runs(panel, comparison)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_engine_gets_the_job_when_it_is_replaced(own_session, panel, comparison, rank):
    """Rank 0 has one device's runs as well: they are made again, as after a restart."""
    kill(own_session, rank)
    assert_runs(panel, comparison)
    assert wb.compare(
        make_model, data(), F.cross_entropy, ["data"], batch_size=16, steps=4, session=own_session, keep=False
    ).all_equal


def test_an_engine_that_is_lost_while_a_run_goes_on(own_session, panel, comparison):
    (pid,) = own_session.run("import os; os.getpid()", ranks=[1]).values
    panel.run(steps=100_000)
    while panel._runs_section.live.history.last_step == 0:
        panel.wait(0.1)
    os.kill(pid, signal.SIGKILL)
    assert panel.wait(WAIT_TIMEOUT_S)
    assert "rank 1 died" in str(panel.error) and "rank 1 died" in panel._runs_section.live.failure.value
    assert_runs(panel, comparison)
