"""Heartbeats of ranks that are alone on their hosts, where no peer can see that their process was stopped.

Only such a rank increments a key in the rendezvous store, once a second. A rank that waits for it reads the key
periodically. The count stands still when the process is stopped, when its host or the network has failed, and while one
call holds the GIL; so the silence that counts as an error is much longer than the interval.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from workbench.transport.peer_processes import grace_from_environment
from workbench.transport.rendezvous import Member

INTERVAL_S = 1.0
SILENCE_S = 10.0
"""Longest allowed silence of a rank, unless WORKBENCH_STOPPED_GRACE_S is longer."""


class Heartbeat:
    """The heartbeat of one rank, if it is alone on its host, and its view of other such ranks.

    Attributes:
        alone_on_host: the ranks that are alone on their hosts.
    """

    def __init__(self, store: Store, members: Sequence[Member], rank: int) -> None:
        self._store, self._members, self._rank = store, members, rank
        num_near = Counter((member.host, member.namespace) for member in members)
        alone = [peer for peer, member in enumerate(members) if num_near[member.host, member.namespace] == 1]
        self.alone_on_host = frozenset(alone if len(members) > 1 else ())
        self._silence_s = max(SILENCE_S, grace_from_environment())
        self._last_counts: dict[int, tuple[bytes, float]] = {}
        self._over = threading.Event()
        if rank in self.alone_on_host:
            threading.Thread(target=self._run, name="workbench-heartbeat", daemon=True).start()

    def silence_of(self, rank: int) -> str | None:
        """A text if ``rank`` is alone on its host and has been silent for too long; the store may block."""
        key = f"heartbeat/{rank}"
        if rank not in self.alone_on_host or not self._store.check([key]):
            return None
        count, now = self._store.get(key), time.monotonic()
        before, since = self._last_counts.get(rank, (b"", now))
        if count != before:
            self._last_counts[rank] = (count, now)
            return None
        if now - since < self._silence_s:
            return None
        member = self._members[rank]
        return (
            f"process {member.pid} of rank {rank}, alone on {member.host.split()[0]}, has given no sign of life for "
            f"{now - since:.0f} s: it is stopped (SIGSTOP), its host cannot be reached, or one call keeps Python's lock"
        )

    def close(self) -> None:
        """End the heartbeat."""
        self._over.set()

    def _run(self) -> None:
        count = 0
        while True:
            try:
                self._store.set(f"heartbeat/{self._rank}", str(count))
            except RuntimeError:  # the rank that served the store has ended
                return
            count += 1
            if self._over.wait(INTERVAL_S):
                return
