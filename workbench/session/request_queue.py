"""A first-come, first-served queue: engines run one request at a time, and later requests wait in the notebook."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class RequestQueue:
    """Serializes requests of several threads. `enqueue` returns a ticket at once; `exclusive` waits for it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()

    def enqueue(self) -> object:
        """A ticket behind all that are waiting."""
        ticket = object()
        with self._condition:
            self._queue.append(ticket)
        return ticket

    def is_first(self, ticket: object) -> bool:
        """Whether no request runs or waits before this one."""
        with self._condition:
            return self._queue[0] is ticket

    @contextmanager
    def exclusive(self, ticket: object) -> Iterator[None]:
        """Wait until the ticket is first, and remove it on exit; a KeyboardInterrupt while waiting removes it too."""
        try:
            with self._condition:
                while self._queue[0] is not ticket:
                    self._condition.wait(timeout=1.0)
            yield
        finally:
            with self._condition:
                self._queue.remove(ticket)
                self._condition.notify_all()
