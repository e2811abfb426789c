"""NCCL's rules, for ranks that are threads: what ``torch.distributed`` does with GPUs.

* A communicator runs a rank's calls in their order: one per group for collectives and batches, and one per group and
  pair for single sends and receives. A send ends together with its receive, a collective with those of all members.
* A rank's first call on a communicator returns when the others have made theirs; so does its first with a peer.
* Work is done as late as possible. A sender's memory is read, and a receiver's written, when the receiver waits; until
  then that holds garbage. The results of a collective come at each rank's own wait.
* A handle holds the results of its call.
* The maximum of a number and NaN is the number, and the minimum, too.
* A group that its members make alone has a name by the number of groups of each: members with unlike numbers wait.
* Two ranks on one device are refused. After an abort, waits of the rank end without data, and it can make no call.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

KNOWN = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64}
"""Dtypes of NCCL; torch makes bools of bytes and complex numbers of pairs."""
REDUCTIONS = {ReduceOp.SUM: "sum", ReduceOp.MAX: "max", ReduceOp.MIN: "min"}
COMBINED = {"sum": torch.add, "reduce-scatter": torch.add, "max": torch.fmax, "min": torch.fmin}
"""How two terms become one, by the kind of a call."""


class Stalled(AssertionError):
    """No rank can continue."""


class P2POp(NamedTuple):
    """A send or a receive of a batch."""

    op: Any
    tensor: torch.Tensor
    peer: int


class Part:
    """A send, a receive, or this rank's part of a collective. Those of ``others`` end together with it."""

    def __init__(self, kind: str, others: tuple[int, ...], read: torch.Tensor | None, write: list[torch.Tensor]):
        self.kind, self.others, self.read, self.write = kind, others, read, write
        self.size = sum(out.numel() for out in write) if read is None or kind == "all-gather" else read.numel()
        self.arrived: list[torch.Tensor] = []
        self.is_done = False
        self.place: slice | None = None

    def part_of(self, result: torch.Tensor) -> torch.Tensor:
        """What this rank gets of a result."""
        return result if self.place is None else result[self.place][: self.write[0].numel()]

    def is_counterpart(self, of: int, part: Part, rank: int) -> bool:
        """Whether this part of rank ``of`` belongs to ``part`` of ``rank``."""
        wanted = {"send": "receive", "receive": "send"}.get(part.kind, part.kind)
        return not self.is_done and self.kind == wanted and of in part.others and rank in self.others


class Call:
    """A call of one rank, and torch's handle of it."""

    def __init__(self, nccl: PlayedNccl, rank: int, communicator: Any, parts: list[Part]) -> None:
        self.nccl, self.rank, self.communicator, self.parts = nccl, rank, communicator, parts
        self.results: list[torch.Tensor] = []

    def __repr__(self) -> str:
        parts = [f"{part.kind} of {part.size} with {list(part.others)}" for part in self.parts]
        return f"{' and '.join(parts)} on {self.communicator}"

    @property
    def is_done(self) -> bool:
        return all(part.is_done for part in self.parts)

    def is_completed(self) -> bool:
        """Whether the call has ended. Asking for a collective runs it; sends and receives wait for a ``wait``."""
        with self.nccl.lock:
            can_end = self.is_done or self.rank in self.nccl.aborted
            if not can_end and self.nccl.is_on_rank and self.parts[0].kind not in ("send", "receive"):
                can_end = self.nccl.run(self)
                self.nccl.note_waiting(None if can_end else self)
            return can_end

    def wait(self) -> None:
        """Let the rank continue after the call, as torch orders streams."""
        self.nccl.block_until(lambda: self.nccl.run(self), self)
        if self.is_done:
            for part in self.parts:
                for out, value in zip(part.write, part.arrived, strict=True):
                    out.copy_(value)
                self.results += part.write
                part.write, part.arrived = [], []


class PlayedNccl:
    """In the place of ``torch.distributed``; all ranks share it, each in a thread with ``join``.

    Args:
        devices: by rank.
        finds_stalls: whether it is an error at once that no rank can continue. Else the ranks have to find out.
    """

    ReduceOp, P2POp = ReduceOp, P2POp

    def __init__(self, devices: list[Any], finds_stalls: bool = True) -> None:
        if len(set(devices)) < len(devices):
            raise RuntimeError(f"Duplicate GPU detected: {len(devices)} ranks on {len(set(devices))} devices {devices}")
        self.world, self.finds_stalls = tuple(range(len(devices))), finds_stalls
        self.lock, self.local = threading.RLock(), threading.local()
        self.changed = [threading.Condition(self.lock) for _ in devices]
        self.missing: int | None = None
        self.needs: dict[int, int | None] = {}
        self.queues: dict[tuple[Any, int], deque[Call]] = {}
        self.met: set[tuple[Any, int, int]] = set()
        self.num_of_all: dict[int, int] = {}
        self.groups: dict[int, list[Any]] = {}
        self.waiting: dict[int, Any] = {}
        self.aborted: set[int] = set()
        self.ended: set[int] = set()
        self.stall = ""

    # ---- ranks ----------------------------------------------------------------------------------------------------

    def join(self, rank: int) -> None:
        """This thread is a rank."""
        self.local.rank = rank

    @property
    def is_on_rank(self) -> bool:
        return hasattr(self.local, "rank")

    @property
    def rank(self) -> int:
        rank: int = self.local.rank
        return rank

    def abort(self, rank: int | None = None) -> None:
        """Abort the communicators of a rank; without a rank, those of this thread's."""
        with self.lock:
            self.aborted.add(self.rank if rank is None else rank)
            self.wake()

    def end(self) -> None:
        """This thread's program has ended: nobody can wait for it."""
        with self.lock:
            self.ended.add(self.rank)
            self.waiting.pop(self.rank, None)
            self.wake()

    def open_calls(self) -> list[Call]:
        """Calls that have not ended."""
        return [call for queue in self.queues.values() for call in queue if not call.is_done]

    # ---- torch.distributed ----------------------------------------------------------------------------------------

    def new_group(self, ranks: list[int], timeout: Any, use_local_synchronization: bool = False) -> Any:
        members = tuple(ranks)
        kind = "of all" if use_local_synchronization is False else "of members"
        number = self.num_of_all.get(self.rank, 0) if kind == "of all" else self.num_groups()
        group = ("group", kind, number, members)
        self.num_of_all[self.rank] = self.num_of_all.get(self.rank, 0) + (kind == "of all")
        self.groups.setdefault(self.rank, []).append(group)
        self.meet(group, members if use_local_synchronization else self.world)
        return group

    def num_groups(self) -> int:
        """How many groups this rank has: torch names those that members make alone by it."""
        return len(self.groups.get(self.rank, ()))

    def isend(self, tensor: torch.Tensor, peer: int, group: Any = None) -> Call:
        return self.call(("pair", group, *sorted((self.rank, peer))), [self.part("send", tensor, peer)])

    def irecv(self, tensor: torch.Tensor, peer: int, group: Any = None) -> Call:
        return self.call(("pair", group, *sorted((self.rank, peer))), [self.part("receive", tensor, peer)])

    def batch_isend_irecv(self, ops: list[P2POp]) -> list[Call]:
        kinds = {self.isend: "send", self.irecv: "receive"}
        return [self.call(None, [self.part(kinds[op.op], op.tensor, op.peer) for op in ops])]

    def all_gather(self, parts: list[torch.Tensor], tensor: torch.Tensor, async_op: bool, group: Any = None) -> Call:
        members = self.world if group is None else group[-1]
        assert parts[members.index(self.rank)].numel() == tensor.numel() and tensor.dtype in KNOWN
        for part in parts:
            part.view(torch.uint8).fill_(0xFF)
        return self.call(group, [Part("all-gather", members, tensor, parts)])

    def all_gather_into_tensor(self, out: torch.Tensor, tensor: torch.Tensor, group: Any, async_op: bool) -> Call:
        members = self.world if group is None else group[-1]
        assert out.numel() == len(members) * tensor.numel() and out.is_contiguous()
        return self.all_gather(list(out.split(tensor.numel())), tensor, async_op, group)

    def all_reduce(self, tensor: torch.Tensor, operation: Any, group: Any, async_op: bool) -> Call:
        assert tensor.dtype in KNOWN and not tensor.is_neg()
        members = self.world if group is None else group[-1]
        return self.call(group, [Part(REDUCTIONS[operation], members, tensor, [tensor])])

    def reduce_scatter(
        self, out: torch.Tensor, terms: list[torch.Tensor], operation: Any, group: Any, async_op: bool
    ) -> Call:
        members = self.world if group is None else group[-1]
        assert out.dtype in KNOWN and terms[members.index(self.rank)].numel() == out.numel()
        out.view(torch.uint8).fill_(0xFF)
        part = Part("reduce-scatter", members, torch.cat(terms), [out])
        part.place = slice(sum(term.numel() for term in terms[: members.index(self.rank)]), None)
        return self.call(group, [part])

    def reduce_scatter_tensor(
        self, out: torch.Tensor, term: torch.Tensor, operation: Any, group: Any, async_op: bool
    ) -> Call:
        assert term.numel() % out.numel() == 0 and term.is_contiguous()
        return self.reduce_scatter(out, list(term.split(out.numel())), operation, group, async_op)

    # ---- rules ----------------------------------------------------------------------------------------------------

    def part(self, kind: str, tensor: torch.Tensor, peer: int) -> Part:
        assert tensor.dtype in KNOWN and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        if kind == "send":
            return Part(kind, (peer,), tensor, [])
        tensor.view(torch.uint8).fill_(0xFF)
        return Part(kind, (peer,), None, [tensor])

    def call(self, communicator: Any, parts: list[Part]) -> Call:
        call = Call(self, self.rank, communicator, parts)
        with self.lock:
            if self.rank in self.aborted:
                raise RuntimeError("NCCL communicator was aborted")
            self.queues.setdefault((communicator, self.rank), deque()).append(call)
            self.wake(self.rank)
        if communicator is None or communicator[0] == "group":
            self.meet(communicator, self.world if communicator is None else communicator[-1])
        for part in parts:
            self.meet((communicator, "peer"), part.others)
        return call

    def meet(self, what: Any, members: tuple[int, ...]) -> None:
        """Return when all members have called; at once, where they have before."""
        with self.lock:
            self.met |= {(what, self.rank, other) for other in members}
            self.wake(self.rank)
        rank = self.rank
        self.block_until(lambda: self.has_met(what, rank, members), f"the first call on {what}")

    def has_met(self, what: Any, rank: int, members: tuple[int, ...]) -> bool:
        self.missing = next((other for other in members if (what, other, rank) not in self.met), None)
        return self.missing is None

    def run(self, call: Call, visiting: set[Call] | None = None) -> bool:
        """Run a call, after the earlier ones of its rank and its peers. False if that cannot be yet."""
        visiting = set() if visiting is None else visiting
        if call.is_done or call in visiting:
            return call.is_done
        visiting.add(call)
        queue = self.queues[call.communicator, call.rank]
        while queue and queue[0] is not call:
            if not self.run(queue[0], visiting):
                return False
        return all(part.is_done or self.run_part(call, part, visiting) for part in call.parts)

    def run_part(self, call: Call, part: Part, visiting: set[Call]) -> bool:
        parts = {call.rank: part}
        for other in part.others:
            if other == call.rank:
                continue
            found = self.counterpart(call, part, other)
            if found is None:
                self.missing = other
                return False
            if not self.is_first(found[0], visiting):
                return False
            parts[other] = found[1]
        if len({one.size for one in parts.values()}) > 1:
            return False  # NCCL hangs, or writes beyond the end
        terms = [one.read.clone() for _, one in sorted(parts.items()) if one.read is not None]
        if part.kind in COMBINED:
            terms = [functools.reduce(COMBINED[part.kind], terms)]
        for rank, one in parts.items():
            one.arrived, one.is_done = [one.part_of(term) for term in terms] if one.write else [], True
            queue = self.queues[call.communicator, rank]
            while queue and queue[0].is_done:
                queue.popleft()
        return True

    def counterpart(self, call: Call, part: Part, other: int) -> tuple[Call, Part] | None:
        for candidate in self.queues.get((call.communicator, other), ()):
            for one in candidate.parts:
                if one.is_counterpart(other, part, call.rank):
                    return candidate, one
        return None

    def is_first(self, call: Call, visiting: set[Call]) -> bool:
        queue = self.queues[call.communicator, call.rank]
        while queue[0] is not call:
            if not self.run(queue[0], visiting):
                return False
        return True

    # ---- waits ----------------------------------------------------------------------------------------------------

    def block_until(self, can_continue: Any, what: Any) -> None:
        with self.lock:
            self.missing = None
            while not can_continue() and self.rank not in self.aborted:
                self.needs[self.rank] = self.missing
                self.note_waiting(what, can_continue)
                self.changed[self.rank].wait()
                self.missing = None
            self.note_waiting(None)

    def wake(self, rank: int | None = None) -> None:
        """Let ranks look again that wait for a call of ``rank``, or all ranks."""
        for other, missing in self.needs.items():
            if None in (rank, missing) or rank == missing:
                self.changed[other].notify()

    def note_waiting(self, what: Any, can_continue: Any = None) -> None:
        """Record what this rank waits for; raise where all ranks wait in vain."""
        if what is None:
            self.waiting.pop(self.rank, None)
            return
        self.waiting[self.rank] = (what, can_continue or (lambda: self.run(what)))
        all_wait = len(self.waiting) + len(self.ended) == len(self.world)
        if self.finds_stalls and all_wait and not self.stall and not self.can_progress():
            waits = "; ".join(f"rank {rank} waits in {what}" for rank, (what, _) in sorted(self.waiting.items()))
            self.stall = f"no rank can continue: {waits}; ranks {sorted(self.ended)} have ended"
            self.wake()
        if self.stall:
            raise Stalled(self.stall)

    def can_progress(self) -> bool:
        if any(attempt() for _, attempt in self.waiting.values()):
            return True
        moved = any(self.run(queue[0]) for queue in list(self.queues.values()) if queue)
        if moved:
            self.wake()
        return moved
