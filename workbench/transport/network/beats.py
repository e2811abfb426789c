"""Signs of life of ranks that are alone on their hosts, where nobody else can see that they were stopped.

Such a rank, and no other, counts up a key of the meeting's store once a second. A rank that waits for it in vain reads
the key now and then. The count stands still when the process is stopped, when its host or the network has gone without
a word, and while one call keeps Python's lock; so the silence that is an error is much longer than a beat.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from workbench.transport.meeting import Member
from workbench.transport.processes import grace_from_environment

BEAT_S = 1.0
SILENCE_S = 10.0
"""How long a rank may give no sign of life, unless WORKBENCH_STOPPED_GRACE_S gives a stopped process more."""


class Beats:
    """One rank's beat, if it is alone on its host, and what it has heard of others that are.

    Attributes:
        lonely: the ranks that are alone on their hosts.
    """

    def __init__(self, store: Store, members: Sequence[Member], rank: int) -> None:
        self._store, self._members, self._rank = store, members, rank
        num_near = Counter((member.host, member.namespace) for member in members)
        alone = [peer for peer, member in enumerate(members) if num_near[member.host, member.namespace] == 1]
        self.lonely = frozenset(alone if len(members) > 1 else ())
        self._silence_s = max(SILENCE_S, grace_from_environment())
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._over = threading.Event()
        if rank in self.lonely:
            threading.Thread(target=self._beat, name="workbench-beat", daemon=True).start()

    def silence_of(self, rank: int) -> str | None:
        """Says so if a rank that is alone on its host gives no sign of life; asks the store, which may block."""
        key = f"beat/{rank}"
        if rank not in self.lonely or not self._store.check([key]):
            return None
        count, now = self._store.get(key), time.monotonic()
        before, since = self._heard.get(rank, (b"", now))
        if count != before:
            self._heard[rank] = (count, now)
            return None
        if now - since < self._silence_s:
            return None
        member = self._members[rank]
        return (
            f"process {member.pid} of rank {rank}, alone on {member.host.split()[0]}, has given no sign of life for "
            f"{now - since:.0f} s: it is stopped (SIGSTOP), its host cannot be reached, or one call keeps Python's lock"
        )

    def close(self) -> None:
        """End the beat."""
        self._over.set()

    def _beat(self) -> None:
        count = 0
        while True:
            try:
                self._store.set(f"beat/{self._rank}", str(count))
            except RuntimeError:  # the store has ended with the rank that served it
                return
            count += 1
            if self._over.wait(BEAT_S):
                return
