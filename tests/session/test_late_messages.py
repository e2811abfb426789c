"""Messages that come late, as on a busy machine: no rank is killed for them, and no interrupt is lost."""

import os
import signal
import threading

import psutil
import pytest

from workbench.session import stop_escalation

pytestmark = pytest.mark.engines
PAUSE_S = 0.8
"""Longer than all steps of a stop here."""


@pytest.fixture(autouse=True)
def _quick_steps(monkeypatch):
    quick = tuple((after_s / 5, step) for after_s, step in stop_escalation.STEPS)
    monkeypatch.setattr(stop_escalation, "STEPS", quick)


def interrupt_after(after_s, *others):
    """Interrupt this process then, and before it do these things."""

    def act():
        for function, *arguments in others:
            function(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(after_s, act).start()


def assert_nobody_is_killed(session):
    with pytest.raises(KeyboardInterrupt, match=r"(?s)^(?!.*killed)"):
        session.run("while True: pass")
    assert session.run("kept").values == [5, 5]


def test_an_interrupt_that_comes_before_the_request_has_begun_stops_it_as_it_begins(session):
    session.run(f"""
import time
kept, kernel = 5, get_ipython().kernel
plain = kernel.pre_handler_hook

def late():
    kernel.pre_handler_hook = plain
    time.sleep({PAUSE_S})
    plain()

kernel.pre_handler_hook = late
""")
    interrupt_after(0.1)
    assert_nobody_is_killed(session)


@pytest.mark.parametrize("who", ["nanny", pytest.param("controller", marks=pytest.mark.slow)])
def test_ranks_have_their_time_after_the_interrupt_has_come_to_them(session, who):
    session.run("kept = 5")
    if who == "nanny":
        children = psutil.Process(session.status()[0].pid).children()
        [pid] = [child.pid for child in children if "ipyparallel.engine.nanny" in child.cmdline()]
    else:
        pid = session._pool._processes._controller.pid
    wake = threading.Timer(0.1 + PAUSE_S, os.kill, (pid, signal.SIGCONT))
    wake.start()
    try:
        interrupt_after(0.1, (os.kill, pid, signal.SIGSTOP))
        assert_nobody_is_killed(session)
    finally:
        wake.join()
