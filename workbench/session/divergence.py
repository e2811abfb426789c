"""Ranks that wait for others that cannot come any more, because those have finished the cell or do not run it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.session import protocol

FIRST_PROBE_S = 0.25
"""After the first rank was done."""
_LONGEST_PERIOD_S = 1.0
LOCAL_S = 1.0
"""How long ranks of one host have to be in the same wait: all that is ever sent lies in their memory at once."""
REMOTE_S = 10.0
"""The same where something may still be on its way, which is only told of a rank that runs alone."""


class Divergence:
    """Looks at the ranks that still run while others do not."""

    def __init__(self) -> None:
        self._waits: dict[int, str] = {}
        self._since_s = 0.0
        self.period_s = FIRST_PROBE_S  #: until the next look: as short while all of them wait, else longer and longer

    def is_certain(self, statuses: Mapping[int, protocol.RankStatus | None], now: float) -> bool:
        """Whether nobody of them can go on, after what has been seen so far."""
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
