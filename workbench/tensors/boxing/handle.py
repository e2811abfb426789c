"""The handle that an asynchronous boxing returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Handle(Generic[T]):
    """A boxing in progress. Every rank of the world waits for it, once."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    def wait(self) -> T:
        """Wait for the result and return it. An interrupt ends the wait, and so does the death of a rank."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        assert self._result is not None, "the wait was broken off"
        return self._result
