"""The steps by which a session stops ranks: interrupt, then abort their waits, then kill. A pure schedule."""

from __future__ import annotations

#: Seconds after the decision to stop, and the step at that time for ranks that still run.
STEPS = ((0.0, "interrupt"), (0.25, "abort"), (0.6, "interrupt"), (1.0, "interrupt"), (1.5, "kill"))


class StopEscalation:
    """The steps from a given moment on.

    ``interrupt`` sends SIGINT, which reaches Python code. ``abort`` sends a message to the control thread, which ends
    waits for other ranks. ``kill`` sends SIGKILL, for code that is stuck in C.
    """

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._remaining = list(STEPS)

    def due(self, now: float) -> list[str]:
        """The steps that have become due since the last call."""
        due = [step for after, step in self._remaining if now >= self._started_s + after]
        self._remaining = self._remaining[len(due) :]
        return due

    def wakeup(self) -> float | None:
        """When the next step is due; None after the last."""
        return self._started_s + self._remaining[0][0] if self._remaining else None
