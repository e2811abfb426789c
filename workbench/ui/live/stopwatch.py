"""The time that a run has trained."""

from __future__ import annotations

from collections.abc import Callable


class Stopwatch:
    """Counts the seconds of a run, without its pauses and without what follows its last step.

    Args:
        now: returns the present time in seconds.

    >>> times_s = [10.0]
    >>> watch = Stopwatch(lambda: times_s[-1])
    >>> times_s.append(12.0)
    >>> watch.stop()
    >>> times_s.append(99.0)
    >>> watch.seconds
    2.0
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.start()

    def start(self, ago_s: float = 0.0) -> None:
        """Count from ``ago_s`` seconds before now on."""
        self._started_s, self._paused_s = self._now() - ago_s, 0.0
        self._paused_at: float | None = None
        self._stopped_at: float | None = None

    def pause(self) -> None:
        """Count nothing until ``resume``."""
        self._paused_at = self._now()

    def resume(self) -> None:
        """Count again."""
        if self._paused_at is not None:
            self._paused_s += self._now() - self._paused_at
            self._paused_at = None

    def stop(self) -> None:
        """Count nothing more. A pause that goes on is over."""
        if self._stopped_at is None:
            self._stopped_at = self._now() if self._paused_at is None else self._paused_at
        self._paused_at = None

    @property
    def is_paused(self) -> bool:
        """Whether it counts nothing until ``resume``."""
        return self._paused_at is not None

    @property
    def is_stopped(self) -> bool:
        """Whether it counts nothing more."""
        return self._stopped_at is not None

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        until = self._stopped_at if self._stopped_at is not None else self._paused_at
        return (self._now() if until is None else until) - self._started_s - self._paused_s
