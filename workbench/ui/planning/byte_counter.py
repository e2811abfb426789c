"""Counts in a thread what the shown strategy sends in a step. A new strategy ends the count of the one before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from workbench.cost.estimate import SentBytes
from workbench.session.planning import CountEnded
from workbench.ui.page_restore import as_request

MOST_RANKS = 64
"""For more ranks the estimate stands: a count takes a second and more for each stage."""
_QUIET_S = 0.3
"""A count begins this long after the last change, so that clicks in a row do not wait for it."""


Counter = Callable[[str, int, Callable[[], bool]], SentBytes]
"""Counts one strategy: its text, the number of ranks, and whether nobody waits for it any more."""


class ByteCounter:
    """Remembers what strategies send, and counts what it does not know yet.

    Args:
        count: counts one strategy, raises ``CountEnded`` if it was ended.
        show: called in the thread when a count is known.
        is_busy: whether something else needs the processors. It ends a count, which begins again afterwards.
    """

    def __init__(self, count: Counter, show: Callable[[], None], is_busy: Callable[[], bool] = lambda: False) -> None:
        self._count, self._show, self._is_busy = count, show, is_busy
        self._known: dict[tuple[str, int], SentBytes | None] = {}
        self._wanted: tuple[str, int] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def known(self, strategy: str, num_ranks: int) -> SentBytes | None:
        """The bytes of a strategy; None before it is counted, and where it cannot be."""
        return self._known.get((strategy, num_ranks))

    def ask(self, strategy: str, num_ranks: int) -> None:
        """Count a strategy, unless it is known; a count of another one ends."""
        key = strategy, num_ranks
        with self._lock:
            self._wanted = key if key not in self._known and num_ranks <= MOST_RANKS else None
            if self._wanted is not None and self._thread is None:
                self._thread = threading.Thread(
                    target=as_request(self._work), name="workbench-count-bytes", daemon=True
                )
                self._thread.start()

    def end(self) -> None:
        """End the count: nobody looks any more."""
        with self._lock:
            self._wanted = None

    def wait(self, timeout_s: float) -> None:
        """Wait until nothing is counted."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _work(self) -> None:
        while (key := self._next()) is not None:
            time.sleep(_QUIET_S)
            is_ended = partial(self._is_ended, key)
            if is_ended():
                continue
            try:
                found = self._count(*key, is_ended)
            except CountEnded:
                continue
            except Exception:  # noqa: BLE001 - any model may fail on metadata in any way; the estimate stands
                if is_ended():  # the end itself may look like a failure of the model
                    continue
                found = None
            with self._lock:
                self._known[key] = found
                self._wanted = None if self._wanted == key else self._wanted
            self._show()

    def _is_ended(self, key: tuple[str, int]) -> bool:
        return self._wanted != key or self._is_busy()

    def _next(self) -> tuple[str, int] | None:
        with self._lock:
            if self._wanted is None:
                self._thread = None
            return self._wanted
