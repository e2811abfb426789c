"""Detects ranks that wait for ranks which have finished the cell, do not run it, or wait for something else. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from workbench.session import protocol

FIRST_PROBE_S = 0.25
"""After the first rank was done."""
_LONGEST_PERIOD_S = 1.0
LOCAL_S = 1.0
"""How long ranks of one host must be in the same wait: their memory and their sockets hold every message at once."""
REMOTE_S = 10.0
"""The same where a message may still be in transit between hosts, or where a process still works."""
QUIET_SHARE = 0.05
"""A process that uses less of a processor only looks at clocks: it neither computes nor sends nor receives."""
STARVED_SHARE = 0.5
"""A process that waits longer for a processor may have something to do, on a machine with too much to do."""


class Divergence:
    """Decides whether the ranks that still run can continue, from the activities of all ranks over time."""

    def __init__(self) -> None:
        self._waits: dict[int, str] = {}
        self._waits_since_s = self._quiet_since_s = self._last_s = 0.0
        self._last: dict[int, protocol.RankActivity] = {}
        self.period_s = FIRST_PROBE_S  #: until the next look: as short while all of them wait, else longer and longer

    def is_certain(
        self, activities: Mapping[int, protocol.RankActivity | None], running: Collection[int], now: float
    ) -> bool:
        """Whether none of the running ranks can continue. The other ranks run nothing of this cell (any more).

        Where all ranks run, or one is stopped, the others find out by themselves, except in plain torch.distributed.
        """
        waits = {rank: found.waits if (found := activities.get(rank)) else "" for rank in running}
        if waits != self._waits:
            self._waits, self._waits_since_s = waits, now
        if self._is_starved(activities, running, now):
            self._waits_since_s = now
        if not self._is_quiet(activities, now):
            self._quiet_since_s = now
        self._last, self._last_s = {rank: found for rank, found in activities.items() if found}, now
        if not waits or not all(waits.values()):
            self.period_s = min(2 * self.period_s, _LONGEST_PERIOD_S)
            return False
        self.period_s = FIRST_PROBE_S
        kinds = {wait.split()[0] for wait in waits.values()}
        if (set(activities) <= set(running) or protocol.STOPPED in kinds) and protocol.PLAIN not in kinds:
            return False
        waited_s = now - self._waits_since_s
        if kinds == {protocol.LOCAL}:
            return waited_s >= LOCAL_S
        # they may be exchanging something large as long as one of them works
        is_one_host = len({found.host for found in activities.values() if found and found.host}) == 1
        quiet_s = min(waited_s, now - self._quiet_since_s)
        return quiet_s >= (LOCAL_S if is_one_host else REMOTE_S) or (len(waits) == 1 and waited_s >= REMOTE_S)

    def _is_starved(
        self, activities: Mapping[int, protocol.RankActivity | None], running: Collection[int], now: float
    ) -> bool:
        """Whether a running rank may have got what it waits for, but no processor to see it."""
        return any(
            found.wanted_s - last.wanted_s > STARVED_SHARE * (now - self._last_s)
            for rank in running
            if (found := activities.get(rank)) and (last := self._last.get(rank))
        )

    def _is_quiet(self, activities: Mapping[int, protocol.RankActivity | None], now: float) -> bool:
        """Whether no process has done anything since the last look, or wanted to."""
        return not self._is_starved(activities, activities, now) and not any(
            found.processor_s - last.processor_s > QUIET_SHARE * (now - self._last_s)
            for rank, found in activities.items()
            if found and (last := self._last.get(rank))
        )
