"""NCCL between GPUs, through torch.distributed. CPU ranks over gloo have a transport of their own (``gloo``).

Slices travel point to point (exact counts, no padding); reductions use NCCL's all-reduce. NCCL orders its operations on
streams, and no wait here blocks the main thread in C++. ``nccl_watchdog`` finds a call that hangs and aborts NCCL's
communicators, so that a main thread that waits for the device continues and raises the error.

A communicator runs a rank's calls in their order, and a large send ends together with its receive. The ranks of a
pipeline call in unlike orders. So each direction of each pair of ranks has a communicator: torch makes one per pair and
group, and there is a group for each direction. Nobody waits for sends: they read copies.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from workbench.core.boxing import LinkCost
from workbench.errors import CollectiveAborted
from workbench.transport.base import ACCUMULATED_IN_32_BITS, AsyncTransport, PeerTensor, pack
from workbench.transport.network import nccl_watchdog
from workbench.transport.network.hang_detector import HAS_LEFT
from workbench.transport.network.nccl_watchdog import NcclWatchdog
from workbench.transport.rendezvous import Rendezvous

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_COMPARED_IN = {torch.int16: torch.int32}
"""NCCL has no 16-bit integers."""
_SUMMED_IN = _COMPARED_IN | dict.fromkeys(ACCUMULATED_IN_32_BITS, torch.float32)
_NUM_YIELDS = 100
_SLEEP_S = 50e-6


class DistributedTransport(AsyncTransport):
    """The ranks of a torch.distributed process group with a backend that orders its work on streams.

    ``cost`` is a constant: all ranks must derive the same decisions from it.
    """

    cost = LinkCost(20e-6, 100e9)

    def __init__(
        self, rank: int, world_size: int, backend: str, timeout_s: float, device: torch.device, rendezvous: Rendezvous
    ) -> None:
        self.name, self.device = backend, device
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(world_size)): None}
        self._downward = dist.new_group(list(range(world_size)))
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._abort_reason: str | None = None
        self._watchdog = NcclWatchdog(rendezvous, rank, timeout_s, self.abort)
        self.sent_bytes = 0
        """Bytes of slices that this rank has sent; NCCL's all-reduces are not counted."""

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        """Start all sends and receives of one exchange."""
        self._raise_if_aborted(header)
        calls: list[tuple[tuple[int, int], Any, torch.Tensor]]
        calls = [((self.rank, peer), dist.isend, _copied_bytes(tensor)) for peer, tensor in sends]
        calls += [((peer, self.rank), dist.irecv, _memory_of(out)) for peer, out in receives]
        calls.sort(key=lambda call: call[0])  # the first call on a communicator waits for the peer's: one order for all
        received = []
        for (source, destination), function, memory in calls:
            group = None if source < destination else self._downward
            work = function(memory, destination if source == self.rank else source, group=group)
            self._watchdog.record(
                header, [nccl_watchdog.send_channel(source, destination)], [source, destination], [work]
            )
            if destination == self.rank:
                received.append(work)
            else:
                self._sending.append((work, memory))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)

        def finish() -> None:
            for work in received:
                work.wait()  # orders the current stream after the transfer; does not block this thread

        return finish

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        self._raise_if_aborted(header)
        total, dtype = pack(tensors), tensors[0].dtype
        total = total.to(_SUMMED_IN.get(dtype, dtype) if reduction == "sum" else _COMPARED_IN.get(dtype, dtype))
        work = dist.all_reduce(total, _REDUCE_OPS[reduction], group=self._group(tuple(group)), async_op=True)
        self._watchdog.record(
            f"{header}, {reduction} of {total.numel()}", [nccl_watchdog.group_channel(group)], group, [work]
        )

        def finish() -> torch.Tensor:
            work.wait()  # orders the current stream after the sum; does not block this thread
            return total.to(dtype)

        return finish

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        self._raise_if_aborted(header)
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        work = dist.all_gather(parts, tensor, async_op=True)
        all_ranks = range(self.world_size)
        self._watchdog.record(
            f"{header}, all-gather of {tensor.numel()}", [nccl_watchdog.group_channel(all_ranks)], all_ranks, [work]
        )
        started, count = time.perf_counter(), 0
        while not work.is_completed():
            count += 1
            if count < _NUM_YIELDS:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S)
            self._raise_if_aborted(header)
            if time.perf_counter() - started > self.timeout_s:
                self.abort(f"all ranks in {header}: nothing came for {self.timeout_s:g} s")
        work.wait()
        return parts

    def flush(self) -> None:
        """Sends are ordered on the stream, and torch keeps their buffers."""

    def abort(self, reason: str) -> None:
        """Publish the reason and abort NCCL's calls in flight: the main thread may wait for the device."""
        if self._abort_reason is None:
            self._abort_reason = reason
            self._watchdog.end(f"gave up: {reason}")
            abort_calls()

    def close(self) -> None:
        if self._groups:
            self._groups.clear()
            self._watchdog.end(HAS_LEFT if self._abort_reason is None else f"gave up: {self._abort_reason}")
            self._watchdog.close()

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of ``ranks``. Its members alone create it, so stages may create groups in any order."""
        key = tuple(sorted(ranks))
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(key), use_local_synchronization=True)
        return self._groups[key]

    def _raise_if_aborted(self, header: str) -> None:
        if self._abort_reason is not None:
            raise CollectiveAborted(f"rank {self.rank} stopped in {header}: {self._abort_reason}")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes to send: NCCL lacks some dtypes and ignores torch's conjugate and negative bits."""
    return _memory_of(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _copied_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes to send in memory that nobody else writes: the caller may write to the tensor at once."""
    sent = _bytes_of(tensor)
    return sent.clone() if sent.data_ptr() == tensor.data_ptr() else sent


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a view; raises where only a copy would be possible."""
    return tensor.detach().view(-1).view(torch.uint8)


def abort_calls() -> None:
    """Abort all NCCL calls of this process, through a private function that torch may remove."""
    abort = getattr(distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.is_initialized():
        with suppress(RuntimeError, ValueError, AttributeError):
            abort()
