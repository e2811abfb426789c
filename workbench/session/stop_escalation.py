"""The steps by which a session stops ranks: interrupt, abort their waits, ask what they do, kill. A pure schedule."""

from __future__ import annotations

#: Seconds after the step before (the first: after the decision to stop), and the step for ranks that still run.
STEPS = (
    (0.0, "interrupt"), (0.25, "abort"), (0.35, "interrupt"), (0.4, "interrupt"), (0.4, "ask"), (0.1, "kill"),
)  # fmt: skip


class StopEscalation:
    """The steps from a given moment on.

    ``interrupt`` raises a KeyboardInterrupt in Python code. ``abort`` ends waits for other ranks. ``ask`` finds ranks
    that ``kill`` must not hit; the others get SIGKILL, for code that is stuck in C.

    A rank can only react while it has a core. So time in which it could not does not count, and a notebook that comes
    late takes one step and leaves the ranks their time until the next.

    Args:
        started_s: the decision to stop.
        waited_s: time up to then that does not count.

    >>> escalation = StopEscalation(10.0)
    >>> escalation.due(10.0), escalation.due(10.1), escalation.due(10.3)
    ('interrupt', '', 'abort')
    """

    def __init__(self, started_s: float, waited_s: float = 0.0) -> None:
        self._last_s, self._waited_s = started_s, waited_s
        self._remaining = list(STEPS)

    def due(self, now: float, waited_s: float = 0.0) -> str:
        """The next step if it is due, else an empty text."""
        if not self._remaining:
            return ""
        self._last_s += max(0.0, waited_s - self._waited_s)
        self._waited_s = waited_s
        after_s, step = self._remaining[0]
        if now < self._last_s + after_s:
            return ""
        self._last_s = now
        del self._remaining[0]
        return step

    def wakeup(self) -> float | None:
        """When the next step is due at the earliest; None after the last."""
        return self._last_s + self._remaining[0][0] if self._remaining else None
