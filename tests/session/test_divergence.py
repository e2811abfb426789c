"""Ranks that run different programs: the cell fails with both calls, and the next cell works in a new world."""

import dataclasses
import time

import pytest

import workbench as wb
from tests.timeouts import PROMPT_S, WAIT_TIMEOUT_S
from workbench.errors import CellError
from workbench.session import protocol
from workbench.session.divergence import LOCAL_S, REMOTE_S, Divergence
from workbench.session.outcome import Outcome
from workbench.transport.messaging.control_page import NUM_SLOTS


def failure(was_stopped=False):
    return protocol.Failure("ValueError", "", (), 0.0, was_stopped=was_stopped, chain=(), syntax="")


def test_what_leaves_exchanges_open():
    assert not Outcome((0, 1)).left_exchanges_open
    assert not Outcome((0, 1), failures={0: failure(), 1: failure()}).left_exchanges_open
    assert Outcome((0, 1), failures={1: failure()}).left_exchanges_open
    assert Outcome((0, 1), failures={0: failure(True), 1: failure(True)}).left_exchanges_open
    broken = dataclasses.replace(failure(), broke_off_step=True)
    assert Outcome((0, 1), failures={0: broken, 1: broken}).left_exchanges_open


@pytest.mark.engines
def test_a_cell_whose_ranks_diverge_names_both_calls_and_the_next_one_works(session):
    session.run('x = wb.ones(4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")')
    with pytest.raises(CellError) as caught:
        session.run('x.to_global(sbp="B") if wb.rank() == 0 else wb.barrier()')
    text = str(caught.value)
    assert "diverged" in text and "boxing" in text and "barrier()" in text
    assert session.run("x.sum().item()").values == [4.0, 4.0]


BROKEN_STEP = """
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
inputs, targets = torch.randn(8, 6), torch.randn(8, 4)
whole = float(F.mse_loss(model(inputs), targets))
model = wb.parallelize(model, "0: data@0; 2: data@1 | 2x1x1 mb=4 1f1b")
calls = []
def loss_fn(output, target):
    calls.extend([1] * isinstance(output, wb.GlobalTensor))  # its first use is tried on made-up values too
    if len(calls) == 3:
        raise ZeroDivisionError("a mistake in the third micro-batch")
    return F.mse_loss(output, target)
"""


@pytest.mark.engines
def test_after_a_mistake_in_a_pipelines_step_the_same_cell_runs_again(session):
    """All ranks raise the same error, at different points of the schedule: what they have sent is not read later."""
    session.run(BROKEN_STEP)
    with pytest.raises(CellError, match="a mistake in the third micro-batch"):
        session.run("wb.forward_backward(model, loss_fn, 3 * inputs, targets)")
    [loss, again] = session.run("wb.forward_backward(model, loss_fn, inputs, targets).item(), whole").values[0]
    assert loss == pytest.approx(again, rel=1e-6)
    session.run(
        "try: calls.clear(); wb.forward_backward(model, loss_fn, 3 * inputs, targets)\nexcept ZeroDivisionError: pass"
    )
    with pytest.raises(CellError, match=r"interrupted by ZeroDivisionError.*run the next cell"):
        session.run("wb.forward_backward(model, loss_fn, inputs, targets).item()")
    [loss, again] = session.run("wb.forward_backward(model, loss_fn, inputs, targets).item(), whole").values[0]
    assert loss == pytest.approx(again, rel=1e-6)


def at(divergence, now, num_ranks=3, hosts=("here",) * 3, work=None, **waits):
    """Asks after ``now`` seconds. Ranks without a wait are done; ``work``: the processor time of each process."""
    running = {int(rank[1:]): wait for rank, wait in waits.items()}
    activities = {
        rank: protocol.RankActivity(running.get(rank, ""), hosts[rank], (work or {}).get(rank, 0.0))
        for rank in range(num_ranks)
    }
    return divergence.is_certain(activities, running.keys(), now)


class TestDivergence:
    def test_is_certain_when_all_that_run_are_in_one_wait_for_a_while(self):
        divergence = Divergence()
        assert not at(divergence, 0.0, r1="near 7", r2="near 3")
        assert not at(divergence, LOCAL_S / 2, r1="near 7", r2="near 3")
        assert at(divergence, LOCAL_S, r1="near 7", r2="near 3")

    def test_another_wait_begins_anew(self):
        divergence = Divergence()
        assert not at(divergence, 0.0, r1="near 7")
        assert not at(divergence, LOCAL_S, r1="near 8")
        assert at(divergence, 2 * LOCAL_S, r1="near 8")

    def test_who_computes_may_still_send(self):
        divergence = Divergence()
        assert not any(at(divergence, now, r1="near 7", r2="") for now in (0.0, LOCAL_S, 100.0))
        assert not any(Divergence().is_certain({0: None, 1: None}, [1], now) for now in (0.0, 100.0))

    @pytest.mark.parametrize("kind", [protocol.REMOTE, protocol.PLAIN])
    def test_on_one_host_everything_that_was_sent_arrives_as_long_as_a_process_works(self, kind):
        waits = {"r1": f"{kind} 7", "r2": f"{kind} 3"}
        divergence = Divergence()
        assert not at(divergence, 0.0, **waits) and at(divergence, LOCAL_S, **waits)
        for worker in range(3):  # rank 0 has finished: it may send what its program has left to other threads
            divergence = Divergence()
            assert not any(at(divergence, now, work={worker: 0.1 * now}, **waits) for now in range(100))

    def test_what_comes_from_another_host_has_more_time(self):
        divergence, hosts = Divergence(), ("here", "here", "there")
        assert not any(at(divergence, now, hosts=hosts, r1="far 7", r2="far 7") for now in (0.0, REMOTE_S / 2))
        assert at(divergence, REMOTE_S, hosts=hosts, r1="far 7", r2="far 7")

    def test_one_rank_that_waits_alone_waits_for_nobody(self):
        divergence = Divergence()
        assert not any(at(divergence, now, work={1: now}, r1="far 7") for now in (0.0, REMOTE_S / 2))
        assert at(divergence, REMOTE_S, work={1: REMOTE_S}, r1="far 7")

    def test_where_all_run_only_plain_waits_need_the_notebook(self):
        for kind, found in ((protocol.LOCAL, False), (protocol.REMOTE, False), (protocol.PLAIN, True)):
            divergence, waits = Divergence(), {"r0": f"{kind} 7", "r1": "near 3"}
            assert not at(divergence, 0.0, 2, **waits) and at(divergence, LOCAL_S, 2, **waits) is found

    def test_a_rank_without_a_processor_may_have_its_message_already(self):
        divergence = Divergence()
        for now in range(10):
            starved = {r: protocol.RankActivity("near 7" if r else "", "here", 0.0, 0.9 * now * r) for r in range(2)}
            assert not divergence.is_certain(starved, [1], float(now))

    def test_a_stopped_process_never_comes(self):
        for kind, found in ((protocol.LOCAL, False), (protocol.PLAIN, True)):
            divergence, waits = Divergence(), {"r0": f"{kind} 7", "r1": protocol.STOPPED}
            assert not at(divergence, 0.0, 2, **waits) and at(divergence, LOCAL_S, 2, **waits) is found


@pytest.mark.engines
@pytest.mark.timed
@pytest.mark.parametrize(
    ("code", "ranks", "words"),
    [
        (
            "for _ in range(1 + wb.rank()): x.to_global(sbp='B')",
            None,
            "rank 1 waits for other ranks, but rank 0 has fin",
        ),
        ("x.to_global(sbp='B')", [0], "rank 0 waits for other ranks, but they do not run it"),
    ],
)
def test_a_rank_that_waits_for_one_that_is_done_is_stopped(session, code, ranks, words):
    session.run('x = wb.ones(4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)"); kept = 5')
    began = time.monotonic()
    with pytest.raises(CellError) as caught:
        session.run(code, ranks=ranks)
    assert time.monotonic() - began < PROMPT_S
    assert f"The ranks have diverged in this cell: {words}" in str(caught.value)
    waiting = words[:6]
    assert f"{waiting} waits for rank {1 - int(waiting[-1])} in boxing" in str(caught.value)
    assert "at cell line 1, in GlobalTensor.to_global" in str(caught.value) and "its variables are kept" in str(
        caught.value
    )
    assert session.run("x.sum().item(), kept").values == [(4.0, 5)] * 2


ONE_WAY = """
import time
first, second = (wb.placement("cpu", ranks=[rank]) for rank in (0, 1))
x = wb.ones(4, placement=first, sbp="B")
"""
SEND_MORE_THAN_A_RING_HOLDS = f"for _ in range({3 * NUM_SLOTS}): y = x.to_global(placement=second, sbp='B')"


@pytest.mark.engines
def test_messages_leave_a_rank_that_has_finished_its_cell(session):
    """They found the ring full, as their reader was late; the reader waited until this rank exchanged something."""
    session.run(ONE_WAY)
    late = f"if wb.rank() == 1: time.sleep(0.5)\n{SEND_MORE_THAN_A_RING_HOLDS}"
    assert session.run(f"{late}\nwb.rank()", timeout=WAIT_TIMEOUT_S).values == [0, 1]
    assert session.submit(_sends_one_way).result(timeout=WAIT_TIMEOUT_S) == [0, 1]
    assert session.run("y.full_tensor().sum().item()").values == [4.0, 4.0]


@pytest.mark.slow
@pytest.mark.engines
def test_a_rank_whose_messages_nobody_reads_is_stopped(session):
    session.run(ONE_WAY)
    with pytest.raises(CellError, match="rank 0 waits for other ranks, but rank 1 has finished it"):
        session.run(f"if wb.rank() == 0:\n    {SEND_MORE_THAN_A_RING_HOLDS}", timeout=WAIT_TIMEOUT_S)
    assert session.run("x.full_tensor().sum().item()").values == [4.0, 4.0]


def _sends_one_way():
    first, second = (wb.placement("cpu", ranks=[rank]) for rank in (0, 1))
    x = wb.ones(4, placement=first, sbp="B")
    if wb.rank() == 1:
        time.sleep(0.5)
    for _ in range(3 * NUM_SLOTS):
        x.to_global(placement=second, sbp="B")
    return wb.rank()


@pytest.mark.slow
@pytest.mark.engines
def test_a_rank_that_takes_longer_alone_is_not_interrupted(session):
    assert session.run("import time\nif wb.rank(): time.sleep(2.5)\nwb.rank()").values == [0, 1]
