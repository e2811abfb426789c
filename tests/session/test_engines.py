"""Cells and calls on two real engines."""

import os
import signal
import threading
import time

import pytest
import torch

from tests.timeouts import PROMPT_S, WAIT_TIMEOUT_S, wait_until
from workbench.errors import CellError, SessionError
from workbench.session import protocol

pytestmark = pytest.mark.engines


def publish_numbers(count):
    import workbench as wb
    from workbench.session.engine import publish

    for number in range(count):
        publish((wb.rank(), number))
    return wb.rank() * 10


def loop_until_stopped():
    from workbench.session.engine import stop_requested

    steps = 0
    while not stop_requested():
        time.sleep(0.01)
        steps += 1
    return steps


def fail_on_rank_1():
    import workbench as wb

    wb.barrier()  # rank 0 is in here too before rank 1 fails
    if wb.rank() == 1:
        raise RuntimeError("no luck")
    time.sleep(30)


def sleep_long():
    time.sleep(600)


def stay_in_c_on_rank_1():
    import hashlib

    import workbench as wb

    def stay_in_c():
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 200_000_000)  # a minute and more

    if wb.rank() == 1:
        stay_in_c()


def all_sleep(session):
    return all(status.busy and "sleep_long" in status.doing for status in session.status())


class TestValues:
    def test_the_last_expression_by_rank(self, session):
        assert session.run("wb.rank() * 2").values == [0, 2]
        assert session.run("x = 3").values == [None, None]
        assert session.run("x + 1;").values == [None, None]
        assert session.run("x + 1").values == [4, 4]

    def test_a_cell_may_await(self, session):
        """It got no reply, and was killed when it was interrupted."""
        waits = "import asyncio\nkept = 7\nawait asyncio.sleep"
        assert session.run(f"{waits}(0.01)\nkept").values == [7, 7]
        with pytest.raises(CellError, match=r"(?s)Timeout(?!.*killed)"):
            session.run(f"{waits}(60)", timeout=0.3)
        assert session.run("kept").values == [7, 7]
        with pytest.raises(CellError, match="ZeroDivisionError on ranks 0-1"):
            session.run(f"{waits}(0)\n1 / 0")

    def test_on_some_ranks(self, session):
        result = session.run("wb.rank()", ranks=[1])
        assert result.values == [1]
        assert result.text == "[1] 1"

    def test_tensors_come_without_their_graph(self, session):
        values = session.run("(torch.ones(3, requires_grad=True) * wb.rank(), 'name')").values
        assert torch.equal(values[1][0], torch.ones(3))
        assert not values[1][0].requires_grad

    def test_functions_and_classes_of_the_cell_come_back(self, session):
        values = session.run("def twice(x):\n    return 2 * x\ntwice").values
        assert values[0](21) == 42

    def test_large_and_unpicklable_values_stay(self, session):
        large, lock = session.run("import threading\n(torch.zeros(5_000_000))"), session.run("threading.Lock()")
        assert all(isinstance(value, protocol.OmittedValue) for value in [*large.values, *lock.values])
        assert "session.pull" in repr(large.values[0])

    def test_shown_values_are_not_kept_on_the_engine(self, session):
        session.run("import weakref\nclass Thing: pass\nthing = Thing()\nref = weakref.ref(thing)")
        session.run("thing")
        session.run("del thing")
        session.run("1")
        assert session.run("ref() is None").values == [True, True]


class TestGlobalTensors:
    MAKE = "x = wb.tensor([[1., 2.], [3., 4.]], placement=wb.placement('cpu', [0, 1]), sbp=wb.sbp.split(0))"

    def test_the_value_is_the_logical_tensor(self, session):
        result = session.run(f"{self.MAKE}\nx", timeout=WAIT_TIMEOUT_S)
        expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        assert all(torch.equal(value, expected) for value in result.values)
        assert result.text.startswith("[all] float32[2, 2]  S(0)  on  ")
        assert result.text.count("tensor(") == 1

    def test_a_cell_on_one_rank_communicates_nothing(self, session):
        session.run(self.MAKE)
        result = session.run("x", ranks=[0], timeout=WAIT_TIMEOUT_S)
        assert isinstance(result.values[0], protocol.OmittedValue)

    def test_pull_gives_the_logical_tensor(self, session):
        session.run(self.MAKE)
        assert torch.equal(session.pull("x"), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


class TestOutput:
    def test_alike_once_and_different_by_rank(self, session):
        text = session.run("print('hello')\nprint('rank', wb.rank())\n'done'").text
        assert text.splitlines() == ["[all] hello", "[0] rank 0", "[1] rank 1", "[all] 'done'"]

    def test_stderr_is_kept_apart(self, session):
        shown = []
        session.run_cell(
            "import sys; print('out'); print('err', file=sys.stderr)", show=lambda stream, block: shown.append(stream)
        )
        assert sorted(shown) == ["stderr", "stdout"]

    def test_output_comes_while_the_cell_runs(self, session, tmp_path):
        """The cell ends when its output has been shown."""
        shown = tmp_path / "shown"
        session.run_cell(
            f"import os, time\nprint('first', flush=True)\nwhile not os.path.exists({str(shown)!r}): time.sleep(0.01)",
            show=lambda stream, block: shown.touch(),
            timeout=WAIT_TIMEOUT_S,
        )
        assert shown.exists()

    def test_a_flood_is_folded(self, session):
        text = session.run("for i in range(5000): print(i, wb.rank())").text
        assert "lines folded" in text
        assert len(text.splitlines()) < 500
        assert "[1] 4999 1" in text


class TestPushPull:
    def test_round_trip(self, session):
        session.push(a=1, b=torch.arange(3))
        assert session.run("a + int(b.sum())").values == [4, 4]
        assert [item.tolist() for item in session.pull("b")] == [[0, 1, 2]] * 2

    def test_unknown_name(self, session):
        with pytest.raises(CellError, match=r"NameError on ranks 0-1.*no variable 'nothing'"):
            session.pull("nothing")


class TestCalls:
    def test_results_and_messages_in_order(self, session):
        call = session.submit(publish_numbers, 200)
        assert call.result(timeout=WAIT_TIMEOUT_S) == [0, 10]
        messages = call.messages()
        for rank in (0, 1):
            assert [content for sender, content in messages if sender == rank] == [(rank, n) for n in range(200)]
        assert call.messages() == []
        assert call.done()

    def test_functions_of_the_caller_travel(self, session):
        offset = 5
        assert session.submit(lambda x: x + offset, 1).result(timeout=WAIT_TIMEOUT_S) == [6, 6]

    def test_stop_is_asked_for(self, session):
        call = session.submit(loop_until_stopped)
        wait_until(lambda: all("sleep" in str(each.stack) for each in session.status()), session.status)
        assert not call.done()
        with pytest.raises(TimeoutError, match="still running"):
            call.result(timeout=0.05)
        call.request_stop()
        assert all(steps > 0 for steps in call.result(timeout=WAIT_TIMEOUT_S))
        after = session.submit(publish_numbers, 1).result(timeout=WAIT_TIMEOUT_S)
        assert after == [0, 10]  # the next call is not stopped

    @pytest.mark.timed
    def test_one_rank_fails_and_the_others_are_stopped(self, session):
        started = time.monotonic()
        call = session.submit(fail_on_rank_1)
        with pytest.raises(CellError, match="RuntimeError on rank 1: no luck") as caught:
            call.result(timeout=WAIT_TIMEOUT_S)
        assert 'raise RuntimeError("no luck")' in str(caught.value)
        assert "rank 0 was running in fail_on_rank_1" in str(caught.value)
        assert time.monotonic() - started < PROMPT_S

    def test_cancel(self, session):
        call = session.submit(sleep_long)
        wait_until(lambda: all_sleep(session), session.status)
        call.cancel()
        with pytest.raises(
            CellError, match=r"ranks 0-1 were running in sleep_long \(test_engines\.py:\d+\) and stopped"
        ):
            call.result(timeout=WAIT_TIMEOUT_S)

    def test_a_cell_waits_for_a_running_call(self, session, capsys):
        call = session.submit(publish_numbers, 50)
        assert session.run("1").values == [1, 1]
        assert call.done()


@pytest.mark.timed
class TestFailures:
    def test_equal_failures_once_with_the_line(self, session):
        with pytest.raises(CellError) as caught:
            session.run("x = 0\n1 / x")
        text = str(caught.value)
        assert text.count("ZeroDivisionError") == 1
        assert "on ranks 0-1" in text
        assert "▶    2  1 / x" in text
        assert set(caught.value.failures) == {0, 1}

    @pytest.mark.sampled(2, 1)
    @pytest.mark.parametrize(
        "wait", ["import time; time.sleep(30)", "wb.barrier()", "dist.barrier()", "dist.recv(t, 1)"]
    )
    def test_one_rank_fails_while_the_other_waits(self, session, wait):
        session.run("import torch.distributed as dist\nt = torch.zeros(1)\nkept = 17")
        started = time.monotonic()
        with pytest.raises(CellError) as caught:
            session.run(f"if wb.rank() == 1:\n    raise KeyError('lost')\n{wait}")
        assert time.monotonic() - started < PROMPT_S
        text = str(caught.value)
        assert "KeyError on rank 1: 'lost'" in text
        assert "rank 0 was running at cell line 3" in text
        assert "KeyboardInterrupt" not in text
        assert session.run("t = torch.ones(1); dist.all_reduce(t); (float(t), kept)").values == [(2.0, 17)] * 2

    def test_a_failed_function_lets_go_of_its_tensors(self, session):
        session.run("""
import gc, weakref
def fail():
    large = torch.ones(10)
    refs.append(weakref.ref(large))
    raise MemoryError("too much")
refs = []
""")
        with pytest.raises(CellError, match="MemoryError"):
            session.run("fail()")
        assert session.run("gc.collect(); refs[0]() is None").values == [True, True]

    def test_syntax_error_runs_nowhere(self, session):
        with pytest.raises(CellError, match="never closed"):
            session.run("ran = 1\nx = (1,\n")
        assert session.run("'ran' in globals()").values == [False, False]

    def test_timeout_says_who_and_where(self, session):
        started = time.monotonic()
        with pytest.raises(CellError) as caught:
            session.run("import time\nif wb.rank() == 0:\n    time.sleep(30)", timeout=0.5)
        assert time.monotonic() - started < PROMPT_S
        assert "may take 500 ms, but rank 0 of 0-1 still ran" in str(caught.value)
        assert "cell line 3" in str(caught.value)

    def test_unknown_rank(self, session):
        with pytest.raises(SessionError, match="rank 2 does not exist"):
            session.run("1", ranks=[2])

    def test_interrupt_reaches_the_engines_and_the_caller(self, session):
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt, match="cell line 2"):
            session.run("import time\ntime.sleep(30)")
        assert time.monotonic() - started < PROMPT_S
        assert session.run("1").values == [1, 1]

    def test_output_that_cannot_be_shown_stops_the_engines(self, session):
        def show(stream, block):
            raise OSError("no space left")

        started = time.monotonic()
        with pytest.raises(OSError, match="no space left"):
            session.run_cell("print('text', flush=True)\nimport time\ntime.sleep(30)", show=show)
        assert time.monotonic() - started < PROMPT_S
        assert session.run("1").values == [1, 1]

    def test_ten_interrupts_in_a_row(self, session):
        session.run("import time; kept = 5")
        for after_s in 5 * (0.0, 0.15):

            def interrupt(after_s=after_s):
                wait_until(lambda: session.is_busy, "a cell")
                time.sleep(after_s)
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                session.run("time.sleep(30)")
        assert session.run("kept").values == [5, 5]

    def test_an_engine_stuck_in_c_is_killed_and_replaced(self, session):
        session.run("kept = 17")
        call = session.submit(stay_in_c_on_rank_1)
        wait_until(lambda: "in stay_in_c" in session.status()[1].doing, session.status)
        started = time.monotonic()
        call.cancel()
        with pytest.raises(CellError) as caught:
            call.result(timeout=WAIT_TIMEOUT_S)
        assert time.monotonic() - started < PROMPT_S
        assert "rank 1 did not react" in str(caught.value)
        assert "variables are lost" in str(caught.value)
        assert session.run("globals().get('kept'), wb.rank()").values == [(17, 0), (None, 1)]

    @pytest.mark.slow
    def test_a_loop_that_swallows_interrupts_ends_with_its_engine(self, session):
        session.run("kept = 7\nimport time")
        code = "while wb.rank() == 0:\n    try: time.sleep(100)\n    except BaseException: pass"
        with pytest.raises(CellError, match="rank 0 did not react to an interrupt"):
            session.run(code, timeout=0.2)
        assert session.run("globals().get('kept')").values == [None, 7]

    def test_a_rank_that_waits_inside_ddp_keeps_its_variables(self, session):
        session.run(
            "import time, torch\nkept = 23\nddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))"
        )
        started = time.monotonic()
        with pytest.raises(CellError) as caught:
            session.run("ddp(torch.ones(2, 4)).sum().backward() if wb.rank() == 0 else time.sleep(60)", timeout=0.5)
        assert time.monotonic() - started < PROMPT_S
        assert "rank 0 was running at cell line 1" in str(caught.value)
        assert session.run("globals().get('kept'), wb.rank()").values == [(23, 0), (23, 1)]
        session.run("import torch; torch.distributed.barrier()")

    def test_an_engine_that_dies_is_told_and_replaced(self, session):
        started = time.monotonic()
        with pytest.raises(CellError, match=r"rank 0 died while running this cell \(killed by SIGKILL\)"):
            session.run("import os, signal\nif wb.rank() == 0: os.kill(os.getpid(), signal.SIGKILL)\nwb.barrier()")
        assert time.monotonic() - started < PROMPT_S
        assert session.run("wb.barrier(); wb.rank()").values == [0, 1]


class TestStatus:
    def test_idle_and_busy(self, session):
        wait_until(lambda: all(status.alive and not status.busy for status in session.status()), session.status)
        idle = session.status()
        assert [status.rank for status in idle] == [0, 1]
        assert all(status.alive and not status.busy and status.device == "cpu" for status in idle)
        assert all(status.memory_bytes > 10_000_000 for status in idle)
        call = session.submit(sleep_long)
        try:
            wait_until(lambda: all_sleep(session), session.status)
        finally:
            call.cancel()


def test_restart_of_one_rank_keeps_the_other(session, capfd):
    session.run("kept = 3")
    before = [status.pid for status in session.status()]
    calls = [session.submit(time.sleep, seconds) for seconds in (100, 0.3)]
    wait_until(lambda: session._pool.active, "the first call")
    session.restart([1])
    assert "this waits its turn" in capfd.readouterr().err
    assert calls[0].exception() is not None and calls[1].result(WAIT_TIMEOUT_S) == [None, None]
    after = [status.pid for status in session.status()]
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    assert session.run("'kept' in globals()").values == [True, False]
