"""Which request the main thread handles. What the control thread does to stop a run reaches no later one.

A message that stops a run travels on a channel of its own. On a busy machine it may arrive before the run's request,
or after the next one. So it names its run, and is compared under a lock that each request takes as it begins.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from workbench.session import protocol

_turn = threading.RLock()
_run = 0
_is_handling = False
_run_to_stop = 0
_ALL = (protocol.INTERRUPT, protocol.ERROR)
_spared: Collection[str] = _ALL


@contextmanager
def beginning(run: int) -> Iterator[bool]:
    """The main thread begins a request. Whether this run is to be stopped: that message came before it.

    Within the context nothing stops a run: what has interrupted an earlier one has been sent.

    Args:
        run: of the request's tag; 0 for a request of another client.
    """
    global _run, _is_handling, _spared
    with _turn:
        _run, _is_handling, _spared = run or _run, True, _ALL
        yield run != 0 and run == _run_to_stop


def end() -> None:
    """The main thread has sent its reply."""
    global _is_handling
    _is_handling = False


def state() -> tuple[int, bool]:
    """The number of the last run that has begun, and whether the main thread handles a request now."""
    with _turn:
        return _run, _is_handling


def spared() -> Collection[str]:
    """What an ``except`` or ``finally`` clause of the present request may handle so that no interrupt ends it.

    Until `stop` says it, all is spared: a signal that comes earlier is from a nanny whose engine has yet to take the
    message.
    """
    return _spared


def stop(run: int, spared: Collection[str]) -> None:
    """Interrupt the main thread if it handles this run or an earlier one. A run that has not begun is stopped then.

    Call it on the control thread.
    """
    global _run_to_stop, _spared
    with unless_later(run) as is_in_time:
        if _run < run:
            _run_to_stop = run
        if is_in_time and _is_handling:
            _spared = spared
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@contextmanager
def unless_later(run: int) -> Iterator[bool]:
    """Whether no later run than this one has begun. None begins within the context."""
    with _turn:
        yield _run <= run
