"""gloo between CPU ranks, point to point only: every message names its call, and every wait can be ended.

gloo delivers a message to the receive with the same *slot*, and sends it when that receive is posted. The slot combines
the tag with a hash of the header, so messages of two different calls never match: ranks that diverged wait, and
``hang_detector`` finds out why, instead of continuing with wrong numbers. Reductions use such messages, too, because
gloo's own all-reduce of two different sizes may kill the process. No wait blocks the main thread in C++, where it would
ignore SIGINT: gloo reports the completion of a receive only in a blocking wait, so a helper thread blocks.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from workbench.core.boxing import LinkCost
from workbench.errors import CollectiveAborted
from workbench.transport.base import PeerTensor, Transport, copied, pack, reason_of
from workbench.transport.network.hang_detector import HAS_LEFT, HangDetector, Wait
from workbench.transport.network.helper_thread import HelperThread, Job
from workbench.transport.reduction import group_tag, reduce_into, slices_of
from workbench.transport.user_code import user_location

ONE_SHOT_BYTES = 16 * 2**10
"""Up to this size each of three or more ranks reduces all terms itself, which saves one round of messages."""
_LOOK_AFTER_S = 0.1
_LAST_MESSAGES_S = 10.0
"""Limit of the time for which a rank that closes waits until its peers have received its last messages."""
_AT_ONCE = datetime.timedelta(milliseconds=1)
_TAG_BITS, _HASH_BITS = 20, 11
_NEVER_SENT = (1 << 31) - 1

_CPU = torch.device("cpu")

Finish = Callable[[], None]


class GlooTransport(Transport):
    """The ranks of torch.distributed's default process group, whose backend is gloo.

    ``cost`` is a constant: all ranks must derive the same decisions from it.
    """

    name = "gloo"
    cost = LinkCost(400e-6, 1.5e9, ONE_SHOT_BYTES)

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, hang_detector: HangDetector, device: torch.device = _CPU
    ) -> None:
        self.rank, self.world_size, self.timeout_s, self.device = rank, world_size, timeout_s, device
        self.hang_detector = hang_detector
        self.abort_reason: str | None = None
        self.sent_bytes = self.read_bytes = 0
        """Bytes that this rank has sent and received."""
        self.external_failure: Callable[[], str | None] = lambda: None
        """Called periodically during a wait; returns the failure of another transport, or None."""
        self._receiver, self._sender = HelperThread("workbench-receive"), HelperThread("workbench-send")
        self._last_send: Job | None = None
        self._wait: Callable[[], Wait] | None = None
        self._has_ended = False

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Finish:
        """Start an exchange; the returned function waits until all of ``receives`` are filled.

        Copies are sent: a message may wait for its receiver while the caller writes to its tensor.
        """
        contiguous = torch.contiguous_format
        copies = copied(sends, lambda tensor: tensor.detach().to(_CPU, copy=True, memory_format=contiguous))
        if self.device.type == "cpu":
            return self._start(copies, receives, tag, header)
        staged = [(peer, torch.empty_like(out, device=_CPU)) for peer, out in receives]
        wait = self._start(copies, staged, tag, header)

        def finish() -> None:
            wait()
            for (_, out), (_, arrived) in zip(receives, staged, strict=True):
                out.copy_(arrived)

        return finish

    def _start(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str) -> Finish:
        """The same for contiguous tensors to which nobody writes."""
        self._raise_if_ended()
        slot = slot_of(tag, header)
        with self._abort_on_error(), self._translating_errors(header, [peer for peer, _ in [*receives, *sends]]):
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
        tag, others = group_tag(tag, group), [rank for rank in group if rank != self.rank]
        is_one_shot = len(group) == 2 or own.nbytes <= ONE_SHOT_BYTES
        slices = slices_of(group, own.numel(), is_one_shot)
        mine = own[slices[self.rank]]
        terms = {rank: torch.empty_like(mine) for rank in others}
        wait = self._start([(rank, own[slices[rank]]) for rank in others], list(terms.items()), tag, header)
        terms[self.rank] = mine

        def finish() -> torch.Tensor:
            wait()
            total = torch.empty_like(own)
            # One rank reduces each slice, in the order of the group: all ranks get the same bits.
            reduce_into([terms[rank] for rank in group], total[slices[self.rank]], reduction)
            if not is_one_shot:
                part = total[slices[self.rank]].clone()  # the caller may write to the total before it is sent
                receives = [(rank, total[slices[rank]]) for rank in others]
                self._start([(rank, part) for rank in others], receives, tag, f"{header}, second step")()
            return total.to(self.device)

        return finish

    def awaited_call(self) -> tuple[int, str] | None:
        wait = self._wait
        return None if wait is None else (wait().source, wait().call)

    def abort(self, reason: str) -> None:
        self.abort_reason = self.abort_reason or reason

    def close(self) -> None:
        if self._has_ended:
            return
        if self.abort_reason is None and self._last_send is not None:
            self._last_send.finished.wait(_LAST_MESSAGES_S)  # peers may not have received the last messages yet
        self._end(HAS_LEFT if self.abort_reason is None else f"gave up: {self.abort_reason}")

    def retire(self) -> None:
        """End the threads and close the files, after another transport has taken over or this one has ended."""
        for helper in (self._receiver, self._sender, self.hang_detector):
            helper.close()

    def _send(self, tensor: torch.Tensor, destination: int, slot: int) -> None:
        """Start a send; a helper thread keeps its buffer alive until it is sent."""
        pending = self.hang_detector.pending.setdefault(destination, [])
        pending.append(slot)
        self.hang_detector.sent[destination] += 1
        work = dist.isend(tensor, destination, tag=slot)
        buffer = [tensor]

        def wait_until_sent() -> None:
            if work is not None:
                # After the end one send may block until its timeout; those after it need not.
                work.wait(*((_AT_ONCE,) if self._has_ended else ()))
            buffer.clear()
            pending.remove(slot)

        self._last_send = self._sender.submit(wait_until_sent)

    def _finish(self, works: list[tuple[int, Any, int]], slot: int, header: str) -> None:
        if not works:
            return
        self._raise_if_ended()
        waits_for, started = [works[0][0]], time.perf_counter()

        def block() -> None:
            for source, work, num_bytes in works:
                waits_for[0] = source
                work.wait()
                self.hang_detector.received[source] += 1
                self.read_bytes += num_bytes

        with self._abort_on_error(), self._translating_errors(header, waits_for):
            location = user_location()
            wait = self._wait = lambda: Wait(
                waits_for[0], slot, header + location, self.hang_detector.received[waits_for[0]]
            )
            try:
                self._receiver.run(block, lambda: self._raise_if_stuck(started, wait()))
            finally:
                self._wait = None
                self.hang_detector.forget_wait()

    def _raise_if_stuck(self, started: float, wait: Wait) -> None:
        waited_s = time.perf_counter() - started
        reason = self.abort_reason or self.external_failure()
        if reason is None and waited_s > _LOOK_AFTER_S:
            reason = self.hang_detector.hang_reason(wait)
        if reason is None and waited_s > self.timeout_s:
            reason = f"nothing came for {self.timeout_s:g} s; {self.hang_detector.activity_of(wait.source)}"
        if reason is not None:
            verb = "lost" if self.hang_detector.processes.has_ended(wait.source) else "stopped waiting for"
            raise CollectiveAborted(f"rank {self.rank} {verb} rank {wait.source} in {wait.call}: {reason}")

    @contextmanager
    def _translating_errors(self, header: str, peers: Sequence[int]) -> Iterator[None]:
        """Turn torch's errors about broken connections into ``CollectiveAborted`` with the state of the peer."""
        try:
            yield
        except CollectiveAborted:
            raise
        except RuntimeError as error:
            reasons = (self.hang_detector.loss_reason(peer) for peer in dict.fromkeys(peers))
            text = next((reason for reason in reasons if reason), None) or _short_message(error)
            who = f"rank {peers[0]}" if len(set(peers)) == 1 else f"one of ranks {sorted(set(peers))}"
            raise CollectiveAborted(f"rank {self.rank} lost {who} in {header}{user_location()}: {text}") from error

    @contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        """End the transport on any error: an interrupted exchange leaves messages behind, so no rank may continue."""
        try:
            yield
        except BaseException as error:
            self.fail(reason_of(error))
            raise

    def fail(self, reason: str) -> None:
        """Publish the failure and end the waits of the peers and of this rank's threads."""
        self.abort_reason = self.abort_reason or reason
        if not self._has_ended:
            self._end(f"gave up: {self.abort_reason}")

    def _end(self, how: str) -> None:
        self._has_ended = True
        self.hang_detector.end(how)
        close_connections(self.rank, self.world_size)
        self.retire()
        self._last_send = None

    def _raise_if_ended(self) -> None:
        if self.abort_reason is not None:
            self.fail(self.abort_reason)
            raise CollectiveAborted(f"rank {self.rank}: this world has ended: {self.abort_reason}")


def _short_message(error: RuntimeError) -> str:
    text = str(error).splitlines()[0]
    return "the connection broke: its process, its host or the network has ended" if "onnection " in text else text


def close_connections(rank: int, world_size: int) -> None:
    """End all operations of the default process group at once, on this rank and on its peers.

    gloo closes all connections of a group when a wait times out; its backend has no other call for this. A wait for a
    peer that has ended fails before it times out, so this tries every peer.
    """
    for peer in range(world_size) if dist.is_initialized() else ():
        try:
            if peer != rank:
                dist.irecv(torch.empty(1), peer, tag=_NEVER_SENT).wait(_AT_ONCE)  # type: ignore[union-attr]
        except RuntimeError:
            continue


@lru_cache(maxsize=4096)
def slot_of(tag: int, header: str) -> int:
    """The gloo slot of a call: messages match only with the same tag and the same header.

    gloo's slots have 31 bits. The lower ones hold the tag, so that calls in flight at the same time do not match.
    """
    text = f"{tag} {header}".encode()
    return crc32(text) % (1 << _HASH_BITS) << _TAG_BITS | fold_tag(tag)


def fold_tag(tag: int) -> int:
    """Micro-batch (6 bits), number in the program (13) and direction (1) of a tag: unique among calls in flight."""
    return (tag >> 17 & 0x3F) << 14 | (tag & 0x3FFF)
