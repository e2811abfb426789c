"""Detects ranks that wait for ranks which have finished the cell or do not run it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.session import protocol

FIRST_PROBE_S = 0.25
"""After the first rank was done."""
_LONGEST_PERIOD_S = 1.0
LOCAL_S = 1.0
"""How long ranks of one host must be in the same wait: their shared memory holds every message at once."""
REMOTE_S = 10.0
"""The same where a message may still be in transit; applied only to a rank that runs alone."""


class Divergence:
    """Decides whether the ranks that still run can continue, from their statuses over time."""

    def __init__(self) -> None:
        self._waits: dict[int, str] = {}
        self._since_s = 0.0
        self.period_s = FIRST_PROBE_S  #: until the next look: as short while all of them wait, else longer and longer

    def is_certain(self, statuses: Mapping[int, protocol.RankStatus | None], now: float) -> bool:
        """Whether none of them can continue, from all statuses so far."""
        waits = {rank: status.waits if status is not None else "" for rank, status in statuses.items()}
        if waits != self._waits:
            self._waits, self._since_s = waits, now
        if not waits or not all(waits.values()):
            self.period_s = min(2 * self.period_s, _LONGEST_PERIOD_S)
            return False
        self.period_s = FIRST_PROBE_S
        is_near = all(wait.startswith(protocol.LOCAL) for wait in waits.values())
        if not is_near and len(waits) > 1:
            return False  # they may be exchanging something large
        return now - self._since_s >= (LOCAL_S if is_near else REMOTE_S)
