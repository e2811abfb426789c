"""A first-come, first-served queue: engines run one request at a time, and later requests wait in the notebook."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class RequestQueue:
    """Serializes requests of several threads. `enqueue` returns a ticket at once; `exclusive` waits for it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()

    def __len__(self) -> int:
        """The number of requests that run or wait."""
        return len(self._queue)

    def enqueue(self) -> object:
        """A ticket behind all that are waiting."""
        ticket = object()
        with self._condition:
            self._queue.append(ticket)
        return ticket

    @contextmanager
    def exclusive(
        self,
        ticket: object = None,
        on_wait: Callable[[], object] = lambda: None,
        check: Callable[[], object] = lambda: None,
    ) -> Iterator[None]:
        """Wait until the ticket is first, and remove it on exit; a KeyboardInterrupt while waiting removes it too.

        Args:
            ticket: default: a new one.
            on_wait: called if another request runs or waits before this one.
            check: called five times a second while it waits; raises an error to wait no longer.
        """
        own = object() if ticket is None else ticket
        try:
            with self._condition:
                if own not in self._queue:
                    self._queue.append(own)
                is_first = self._queue[0] is own
            if not is_first:
                on_wait()
            with self._condition:
                while self._queue[0] is not own:
                    check()
                    self._condition.wait(timeout=0.2)
            yield
        finally:
            with self._condition, suppress(ValueError):
                self._queue.remove(own)
                self._condition.notify_all()
