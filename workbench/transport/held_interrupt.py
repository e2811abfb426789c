"""Interrupts of the main thread that wait until somebody can take them."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType


class HeldInterrupt:
    """Holds SIGINT back from its making to ``release``, which raises the KeyboardInterrupt; a context does both.

    From the sending of a request to its end, an exception at any line would leave ranks with a request that nobody
    follows; and one of a rank that joins others would leave these in C++ code that waits for it. In other threads than
    the main one, which gets no signals, it does nothing.

    Args:
        wake: called in the signal's handler when an interrupt comes, to end the holder's wait.
        at_most_s: an interrupt that comes so long after the first one is raised at once.
    """

    def __init__(self, wake: Callable[[], object] = lambda: None, at_most_s: float = math.inf) -> None:
        self._came, self._wake = False, wake
        self._first_s, self._at_most_s = math.inf, at_most_s
        found = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        self._before = found if callable(found) else None
        if self._before is not None:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        self._first_s = min(self._first_s, now)
        if now - self._first_s >= self._at_most_s:
            raise KeyboardInterrupt
        self._came = True
        self._wake()

    @property
    def has_come(self) -> bool:
        """Whether an interrupt waits."""
        return self._came

    def take(self) -> bool:
        """Whether an interrupt waits. It then counts as handled."""
        came, self._came = self._came, False
        return came

    def end(self) -> bool:
        """Stop holding; returns whether an interrupt came."""
        before, self._before = self._before, None
        if before is not None:
            signal.signal(signal.SIGINT, before)
        return self.take()

    def release(self) -> None:
        """Stop holding, and raise what came meanwhile.

        Raises:
            KeyboardInterrupt: there was an interrupt.
        """
        if self.end():
            raise KeyboardInterrupt

    def __enter__(self) -> HeldInterrupt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.release()
        else:
            self.end()
