"""Which request the main thread handles. What the control thread does to stop a run reaches no later one.

A message that stops a run travels on a channel of its own. On a busy machine it may arrive before the run's request,
or after the next one. So it names its run, and is compared under a lock that each request takes as it begins.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_turn = threading.RLock()
_run = 0
_is_handling = False
_run_to_stop = 0
_is_urgent = False


@contextmanager
def beginning(run: int) -> Iterator[bool]:
    """The main thread begins a request. Whether this run is to be stopped: that message came before it.

    Within the context nothing stops a run: what has interrupted an earlier one has been sent.

    Args:
        run: of the request's tag; 0 for a request of another client.
    """
    global _run, _is_handling, _is_urgent
    with _turn:
        _run, _is_handling, _is_urgent = run or _run, True, False
        yield run != 0 and run == _run_to_stop


def end() -> None:
    """The main thread has sent its reply."""
    global _is_handling
    _is_handling = False


def state() -> tuple[int, bool]:
    """The number of the last run that has begun, and whether the main thread handles a request now."""
    with _turn:
        return _run, _is_handling


def is_urgent() -> bool:
    """Whether the present request is to end even where it handles an interrupt."""
    return _is_urgent


def stop(run: int, urgent: bool = False) -> None:
    """Interrupt the main thread if it handles this run or an earlier one. A run that has not begun is stopped then.

    Call it on the control thread. ``urgent``: interrupt also what handles an earlier interrupt.
    """
    global _run_to_stop, _is_urgent
    with unless_later(run) as is_in_time:
        if _run < run:
            _run_to_stop = run
        if is_in_time and _is_handling:
            _is_urgent = urgent
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@contextmanager
def unless_later(run: int) -> Iterator[bool]:
    """Whether no later run than this one has begun. None begins within the context."""
    with _turn:
        yield _run <= run
