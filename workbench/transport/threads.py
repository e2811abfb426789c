"""Simulated ranks: threads of one process that exchange clones through queues.

Most tests run on this, in milliseconds. The hub sees the waits of all ranks, so it detects a deadlock at once and names
the wait of each rank. Ranks that ask for turns run one at a time, until they wait for a message: threads that run at
once fight for Python's lock at every function of torch, which takes longer than most functions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from workbench.core.boxing import LinkCost
from workbench.errors import CollectiveAborted
from workbench.transport.base import PeerTensor, Transport, pack
from workbench.transport.reduction import reduce_into

_ANSWER_S = 5.0
"""Limit of a wait after all ranks have ended: ranks of a later ``run_ranks`` may still answer for the same tensor."""

_TURN_S, _IDLE_S, _MOST_TURNS = 0.05, 0.001, 40
"""A rank waits for its turn as long as the process computes, for so many times ``_TURN_S`` at most. In an idle process,
which computes for less than ``_IDLE_S`` in that time, the rank that has the turn waits for something that the hub does
not see.
"""

_CPU = torch.device("cpu")


class _Message(NamedTuple):
    tensor: torch.Tensor
    header: str


class _Wait(NamedTuple):
    source: int
    tag: int
    header: str


class ThreadHub:
    """The queues that the simulated ranks of one world share.

    ``queues`` is keyed by (source, destination, tag); ``waiting`` holds the wait of each blocked rank, and ``changed``
    by rank what wakes it up.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.lock = threading.Lock()
        self.changed = [threading.Condition(self.lock) for _ in range(num_ranks)]
        self.queues: dict[tuple[int, int, int], deque[_Message]] = {}
        self.waiting: dict[int, _Wait] = {}
        self.begun: set[int] = set()
        self.ended: set[int] = set()
        self.abort_reason: str | None = None
        self._turn = threading.Lock()
        self._has_turn: int | None = None

    def begin(self, rank: int) -> None:
        """From now on ``rank`` runs in turns with the other ranks that have begun."""
        self.begun.add(rank)
        self._take_turn(rank)

    def post(self, source: int, destination: int, tag: int, message: _Message) -> None:
        """Append a message to its queue."""
        with self.lock:
            self.queues.setdefault((source, destination, tag), deque()).append(message)
            self.changed[destination].notify_all()

    def take(self, rank: int, wait: _Wait) -> _Message:
        """Wait for the next message from ``wait.source``."""
        key = (wait.source, rank, wait.tag)
        with self.lock:
            if self.queues.get(key):
                return self.queues[key].popleft()
            self._pass_turn(rank)
            self.waiting[rank] = wait
            try:
                while not self.queues.get(key):
                    self._raise_if_stuck(rank)
                    if not self.changed[rank].wait(_ANSWER_S if len(self.ended) == self.num_ranks else None):
                        self._abort(
                            "its simulated ranks have ended and no rank answers; read global tensors inside run_ranks, "
                            "with full_tensor() on all ranks or to_local(), and return the result"
                        )
                message = self.queues[key].popleft()
            finally:
                del self.waiting[rank]
        self._take_turn(rank)
        return message

    def end(self, rank: int) -> None:
        """Note that the program of ``rank`` has ended: no wait for it can succeed."""
        with self.lock:
            self.ended.add(rank)
            self._pass_turn(rank)
            self._wake_all()

    def check_empty(self) -> None:
        """Raise ``CollectiveAborted`` if a message was sent and never received."""
        left = [
            f"{messages[0].header} from rank {s} to rank {d}" for (s, d, _), messages in self.queues.items() if messages
        ]
        if left:
            raise CollectiveAborted(f"{len(left)} messages were sent and never received, e.g. {left[0]}")

    def abort(self, reason: str) -> None:
        """End the waits of all ranks; the first reason is kept."""
        with self.lock:
            self._abort(reason)

    def _abort(self, reason: str) -> None:
        self.abort_reason = self.abort_reason or reason
        self._wake_all()

    def _wake_all(self) -> None:
        for changed in self.changed:
            changed.notify_all()

    def _take_turn(self, rank: int) -> None:
        computed_s = time.process_time()
        for _ in range(_MOST_TURNS if rank in self.begun else 0):
            if self._turn.acquire(timeout=_TURN_S):
                self._has_turn = rank
                return
            before_s, computed_s = computed_s, time.process_time()
            if computed_s - before_s < _IDLE_S:
                return

    def _pass_turn(self, rank: int) -> None:
        if self._has_turn == rank:
            self._has_turn = None
            self._turn.release()

    def _raise_if_stuck(self, rank: int) -> None:
        if self.abort_reason is None and len(self.waiting) + len(self.ended) == self.num_ranks:
            stuck = [f"rank {r} waits for rank {w.source} in {w.header}" for r, w in sorted(self.waiting.items())]
            if not any(self.queues.get((w.source, r, w.tag)) for r, w in self.waiting.items()):
                gone = f"; ranks {sorted(self.ended)} have ended" if self.ended else ""
                self._abort("deadlock, the ranks called exchanges in other orders: " + "; ".join(stuck) + gone)
        if self.abort_reason is not None:
            raise CollectiveAborted(f"rank {rank} stopped waiting in {self.waiting[rank].header}: {self.abort_reason}")


class ThreadTransport(Transport):
    """One simulated rank's end of a ``ThreadHub``."""

    name, scope = "threads", "process"
    cost = LinkCost(latency_s=20e-6, bandwidth_bytes_per_s=4e9, one_shot_bytes=2**62)

    def __init__(self, hub: ThreadHub, rank: int, device: torch.device = _CPU) -> None:
        self.hub, self.rank, self.world_size, self.device = hub, rank, hub.num_ranks, device
        self.sent_bytes = 0
        """Bytes that this rank has sent."""

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        for destination, tensor in sends:
            self.sent_bytes += tensor.nbytes
            self.hub.post(
                self.rank, destination, tag, _Message(tensor.clone(memory_format=torch.contiguous_format), header)
            )

        def finish() -> None:
            for source, out in receives:
                self._receive(source, out, tag, header)

        return finish

    def _receive(self, source: int, out: torch.Tensor, tag: int, header: str) -> None:
        sent, called = self.hub.take(self.rank, _Wait(source, tag, header))
        if (called, sent.nbytes, sent.dtype) != (header, out.nbytes, out.dtype):
            self.hub.abort(
                f"ranks diverged: rank {self.rank} called {header} and expects {out.nbytes} bytes of {out.dtype} while "
                f"rank {source} called {called} and sent {sent.nbytes} of {sent.dtype}. All ranks must run the same "
                "program."
            )
            raise CollectiveAborted(self.hub.abort_reason or "ranks diverged")
        out.copy_(sent)

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        own = pack(tensors)
        terms = {rank: torch.empty_like(own) for rank in group if rank != self.rank}
        self.exchange([(rank, own) for rank in terms], list(terms.items()), tag, header)
        terms[self.rank], total = own, torch.empty_like(own)
        # In the order of the placement on every rank: the same bits everywhere
        reduce_into([terms[rank] for rank in group], total, reduction)
        return lambda: total

    def abort(self, reason: str) -> None:
        self.hub.abort(reason)

    def close(self) -> None:
        self.hub.end(self.rank)
