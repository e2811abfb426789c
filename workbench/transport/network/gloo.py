"""gloo between CPU ranks, point to point only: every message carries its call, every wait can be ended.

A gloo message goes into the receive that has its *slot*, and leaves the sender when that receive is there. The slot
is made of the tag and a hash of the call, so messages of two different calls never meet: ranks that diverged wait,
and ``watch`` finds out why, instead of going on with wrong numbers. Sums are made of such messages, too; gloo's own
all-reduce of two different sizes may end the process. No wait blocks the main thread in C++, where it would ignore
SIGINT: gloo tells of a receive's completion nowhere but in a blocking wait, so a helper thread blocks.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from workbench.core.boxing import LinkCost
from workbench.core.layout import balanced_bounds
from workbench.errors import CollectiveAborted
from workbench.transport.base import Asynchronous, Message, pack
from workbench.transport.caller import user_frame
from workbench.transport.network.waiting import Helper, Job
from workbench.transport.network.watch import HAS_LEFT, Wait, Watch
from workbench.transport.reducing import combine, tag_in_group

ONE_STEP_BYTES = 16 * 2**10
"""Up to this size every rank of three or more adds up everything itself, which saves a meeting."""
_LOOK_AFTER_S = 0.1
_LAST_MESSAGES_S = 10.0
"""How long a rank that leaves waits for slower ones to fetch what it has sent; less if they have gone."""
_AT_ONCE = datetime.timedelta(milliseconds=1)
_TAG_BITS, _HASH_BITS = 20, 11
_NEVER_SENT = (1 << 31) - 1

_CPU = torch.device("cpu")

Finish = Callable[[], None]


class GlooTransport(Asynchronous):
    """The ranks of torch.distributed's default process group, whose backend is gloo.

    ``cost`` is a constant: decisions that follow from it must be the same on all ranks.
    """

    name = "gloo"
    cost = LinkCost(400e-6, 1.5e9, ONE_STEP_BYTES)

    def __init__(self, rank: int, world_size: int, timeout_s: float, watch: Watch, device: torch.device = _CPU) -> None:
        self.rank, self.world_size, self.timeout_s, self.device = rank, world_size, timeout_s, device
        self.watch = watch
        self.abort_reason: str | None = None
        self.sent_bytes = self.read_bytes = 0
        """Bytes of this rank's data that went to others, and of theirs that came."""
        self.other_reason: Callable[[], str | None] = lambda: None
        """Asked now and then during a wait: why this rank cannot go on, as far as others know."""
        self._receiver, self._sender = Helper("workbench-receive"), Helper("workbench-send")
        self._last_send: Job | None = None
        self._has_ended = False

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> Finish:
        """Begin an exchange; what comes back waits until all of ``receives`` are filled.

        A message may wait long after its call for its receiver, and its tensor be written meanwhile: a copy is sent.
        """
        copies = [(peer, tensor.detach().to(_CPU, copy=True).contiguous()) for peer, tensor in sends]
        if self.device.type == "cpu":
            return self._start(copies, receives, tag, header)
        staged = [(peer, torch.empty_like(out, device=_CPU)) for peer, out in receives]
        wait = self._start(copies, staged, tag, header)

        def finish() -> None:
            wait()
            for (_, out), (_, arrived) in zip(receives, staged, strict=True):
                out.copy_(arrived)

        return finish

    def _start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> Finish:
        """The same for contiguous tensors that nobody writes."""
        self._raise_if_ended()
        slot = slot_of(tag, header)
        with self._giving_up(), self._telling_loss(header, [peer for peer, _ in [*receives, *sends]]):
            works = [(peer, dist.irecv(out, peer, tag=slot), out.nbytes) for peer, out in receives if out.numel()]
            for destination, tensor in sends:
                if tensor.numel():
                    self.sent_bytes += tensor.nbytes
                    self._send(tensor, destination, slot)
        return lambda: self._finish(works, slot, header)

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        own = pack(tensors).to(_CPU)
        tag, others = tag_in_group(tag, group), [rank for rank in group if rank != self.rank]
        is_one_step = len(group) == 2 or own.nbytes <= ONE_STEP_BYTES
        slices = {rank: slice(0, own.numel()) for rank in group}
        if not is_one_step:
            bounds = balanced_bounds(own.numel(), len(group))
            slices = {rank: slice(*bound) for rank, bound in zip(group, bounds, strict=True)}
        mine = own[slices[self.rank]]
        terms = {rank: torch.empty_like(mine) for rank in others}
        wait = self._start([(rank, own[slices[rank]]) for rank in others], list(terms.items()), tag, header)
        terms[self.rank] = mine

        def finish() -> torch.Tensor:
            wait()
            total = torch.empty_like(own)
            # In the order of the group on every rank; each slice by one rank: the same bits everywhere.
            combine([terms[rank] for rank in group], total[slices[self.rank]], reduction)
            if not is_one_step:
                sends = [(rank, total[slices[self.rank]]) for rank in others]
                receives = [(rank, total[slices[rank]]) for rank in others]
                self._start([(rank, part.clone()) for rank, part in sends], receives, tag, f"{header}, second step")()
            return total.to(self.device)

        return finish

    def flush(self) -> None:
        """Messages are copies: nothing to wait for before the tensors are written again."""

    def abort(self, reason: str) -> None:
        self.abort_reason = self.abort_reason or reason

    def close(self) -> None:
        if self._has_ended:
            return
        if self.abort_reason is None and self._last_send is not None:
            self._last_send.finished.wait(_LAST_MESSAGES_S)  # peers may not have fetched the last messages yet
        self._end(HAS_LEFT if self.abort_reason is None else f"gave up: {self.abort_reason}")

    def retire(self) -> None:
        """Another transport has taken over: give back the threads, and the files that watch processes."""
        for helper in (self._receiver, self._sender, self.watch):
            helper.close()

    def _send(self, tensor: torch.Tensor, destination: int, slot: int) -> None:
        """Start a send; its buffer lives until a helper thread has seen it leave."""
        pending = self.watch.pending.setdefault(destination, [])
        pending.append(slot)
        self.watch.sent[destination] += 1
        work = dist.isend(tensor, destination, tag=slot)
        buffer = [tensor]

        def see_off() -> None:
            if work is not None:
                # After the end one send may be stuck until its timeout; those behind it need not wait as long again.
                work.wait(*((_AT_ONCE,) if self._has_ended else ()))
            buffer.clear()
            pending.remove(slot)

        self._last_send = self._sender.submit(see_off)

    def _finish(self, works: list[tuple[int, Any, int]], slot: int, header: str) -> None:
        if not works:
            return
        self._raise_if_ended()
        waits_for, started = [works[0][0]], time.perf_counter()

        def block() -> None:
            for source, work, num_bytes in works:
                waits_for[0] = source
                work.wait()
                self.watch.received[source] += 1
                self.read_bytes += num_bytes

        with self._giving_up(), self._telling_loss(header, waits_for):
            place = place_in_user_code()
            wait = lambda: Wait(waits_for[0], slot, header + place, self.watch.received[waits_for[0]])  # noqa: E731
            try:
                self._receiver.run(block, lambda: self._raise_if_hopeless(started, wait()))
            finally:
                self.watch.forget_wait()

    def _raise_if_hopeless(self, started: float, wait: Wait) -> None:
        waited_s = time.perf_counter() - started
        reason = self.abort_reason or self.other_reason()
        if reason is None and waited_s > _LOOK_AFTER_S:
            reason = self.watch.reason_against(wait)
        if reason is None and waited_s > self.timeout_s:
            reason = f"nothing came for {self.timeout_s:g} s; {self.watch.doing(wait.source)}"
        if reason is not None:
            verb = "lost" if self.watch.processes.has_ended(wait.source) else "stopped waiting for"
            raise CollectiveAborted(f"rank {self.rank} {verb} rank {wait.source} in {wait.call}: {reason}")

    @contextmanager
    def _telling_loss(self, header: str, peers: Sequence[int]) -> Iterator[None]:
        """torch's errors about a broken connection, said in our words, with what is known of the peer."""
        try:
            yield
        except CollectiveAborted:
            raise
        except RuntimeError as error:
            reasons = (self.watch.why_lost(peer) for peer in dict.fromkeys(peers))
            text = next((reason for reason in reasons if reason), None) or _said_shortly(error)
            who = f"rank {peers[0]}" if len(set(peers)) == 1 else f"one of ranks {sorted(set(peers))}"
            raise CollectiveAborted(f"rank {self.rank} lost {who} in {header}{place_in_user_code()}: {text}") from error

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """An exchange that was broken off leaves messages behind: neither this rank nor its peers may go on."""
        try:
            yield
        except BaseException as error:
            self.give_up(str(error) or type(error).__name__)
            raise

    def give_up(self, reason: str) -> None:
        """Tell the peers, and end what they and this rank's threads wait for."""
        self.abort_reason = self.abort_reason or reason
        if not self._has_ended:
            self._end(f"gave up: {self.abort_reason}")

    def _end(self, how: str) -> None:
        self._has_ended = True
        self.watch.end(how)
        close_connections(self.rank, self.world_size)
        self.retire()
        self._last_send = None

    def _raise_if_ended(self) -> None:
        if self.abort_reason is not None:
            self.give_up(self.abort_reason)
            raise CollectiveAborted(f"rank {self.rank}: this world has ended: {self.abort_reason}")


def _said_shortly(error: RuntimeError) -> str:
    text = str(error).splitlines()[0]
    return "the connection broke: its process, its host or the network has ended" if "onnection " in text else text


def close_connections(rank: int, world_size: int) -> None:
    """End all operations of the default process group, here and on the peers, at once.

    gloo closes all connections of a group when a wait runs out of time; its backend has no other call that does. A
    wait for a peer that is gone already fails before that, so every peer is tried.
    """
    for peer in range(world_size) if dist.is_initialized() else ():
        try:
            if peer != rank:
                dist.irecv(torch.empty(1), peer, tag=_NEVER_SENT).wait(_AT_ONCE)  # type: ignore[union-attr]
        except RuntimeError:
            continue


@lru_cache(maxsize=4096)
def slot_of(tag: int, header: str) -> int:
    """Where messages of a call go: they meet only those with the same tag and the same words.

    gloo's slots have 31 bits. The lower ones are the tag, so that calls under way at the same time do not meet.
    """
    text = f"{tag} {header}".encode()
    return crc32(text) % (1 << _HASH_BITS) << _TAG_BITS | fold(tag)


def fold(tag: int) -> int:
    """The tag's micro-batch (6 bits), number in the program (13) and direction (1): enough for what is under way."""
    return (tag >> 17 & 0x3F) << 14 | (tag & 0x3FFF)


def place_in_user_code() -> str:
    """`` at train.py:12``: the line of the user's that waits."""
    frame, _ = user_frame()
    return f" at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""
