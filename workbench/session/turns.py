"""First come, first served: engines run one request at a time, and later ones wait on the notebook's side."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A queue of requests. Take a place at once, then wait for the turn."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()

    def take_place(self) -> object:
        place = object()
        with self._condition:
            self._queue.append(place)
        return place

    def is_next(self, place: object) -> bool:
        with self._condition:
            return self._queue[0] is place

    @contextmanager
    def turn(self, place: object) -> Iterator[None]:
        """Wait for the turn, and end it on leaving; a KeyboardInterrupt while waiting gives the place up."""
        try:
            with self._condition:
                while self._queue[0] is not place:
                    self._condition.wait(timeout=1.0)
            yield
        finally:
            with self._condition:
                self._queue.remove(place)
                self._condition.notify_all()
