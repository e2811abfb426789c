"""The time that a run has trained."""

from __future__ import annotations

from collections.abc import Callable


class Stopwatch:
    """Counts the seconds of a run, without its pauses and without what follows its last step.

    Args:
        now: returns the present time in seconds.

    Attributes:
        is_paused: whether it counts nothing until ``resume``.
        is_stopped: whether it counts nothing more.

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
        self._counted_s, self._since_s = 0.0, self._now() - ago_s
        self.is_paused = self.is_stopped = False

    def pause(self) -> None:
        """Count nothing until ``resume``."""
        self._counted_s, self.is_paused = self.seconds, True

    def resume(self) -> None:
        """Count again."""
        if self.is_paused:
            self._since_s, self.is_paused = self._now(), False

    def stop(self) -> None:
        """Count nothing more. A pause that goes on is over."""
        self._counted_s, self.is_paused, self.is_stopped = self.seconds, False, True

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        is_counting = not (self.is_paused or self.is_stopped)
        return self._counted_s + (self._now() - self._since_s if is_counting else 0.0)
