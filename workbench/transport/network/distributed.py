"""NCCL between GPUs, through torch.distributed. CPU ranks over gloo have a transport of their own (``gloo``).

Slices travel point to point (exact counts, no padding); reductions use NCCL's all-reduce. NCCL orders its operations on
streams, and no wait here blocks the main thread in C++. ``nccl_watchdog`` finds a call that hangs and aborts NCCL's
communicators, so that a main thread that waits for the device continues and raises the error.

A communicator runs a rank's calls in their order, and a large send ends together with its receive. Two ranks that
send to each other in one exchange make it at the same point of the program. Their calls are one batch on the world's
communicator. The ranks of a pipeline call in unlike orders, and each exchange goes one way. So each direction of a pair
has a communicator of its own, from its first use: torch makes one per pair and group, and there is a group for each
direction. Where the calls of one direction have several orders, as with several stages per rank, each order has a
*channel* with communicators of its own. Nobody waits for sends: they read copies, which torch keeps until they are
sent.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError, distributed_c10d

from workbench.core.boxing import LinkCost
from workbench.errors import CollectiveAborted
from workbench.transport.base import ACCUMULATED_IN_32_BITS, PeerTensor, Transport, copied, pack, reason_of
from workbench.transport.network import nccl_watchdog
from workbench.transport.network.hang_detector import HAS_LEFT
from workbench.transport.network.nccl_watchdog import NcclWatchdog, Pending, StreamPosition, torch_timeout
from workbench.transport.rendezvous import Rendezvous

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_COMPARED_IN = {torch.int16: torch.int32}
"""NCCL has no 16-bit integers."""
_SUMMED_IN = _COMPARED_IN | dict.fromkeys(ACCUMULATED_IN_32_BITS, torch.float32)
_NUM_YIELDS = 100
_SLEEP_S = 50e-6


class _Call(NamedTuple):
    """A send or a receive of this rank."""

    source: int
    destination: int
    peer: int
    function: Callable[..., Any]
    memory: torch.Tensor


class DistributedTransport(Transport):
    """The ranks of a torch.distributed process group with a backend that orders its work on streams.

    ``cost`` is a constant: all ranks must derive the same decisions from it.
    """

    cost = LinkCost(20e-6, 100e9)
    has_collectives = matches_by_order = True

    def __init__(
        self, rank: int, world_size: int, backend: str, timeout_s: float, device: torch.device, rendezvous: Rendezvous
    ) -> None:
        warnings.filterwarnings("ignore", "An unbatched P2P op", UserWarning)  # torch's, of communicators for pairs
        self.name, self.device = backend, device
        self.rank, self.world_size = rank, world_size
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(world_size)): None}
        self._channels: dict[str, dist.ProcessGroup] = {}
        self._channel = ""
        self._torch_timeout = torch_timeout(timeout_s)
        self._downward = dist.new_group(list(range(world_size)), timeout=self._torch_timeout)
        self._abort_reason: str | None = None
        self._rendezvous = rendezvous
        self._watchdog = NcclWatchdog(rendezvous, rank, timeout_s, self.abort)
        self.sent_bytes = 0
        """Bytes of slices that this rank has sent; NCCL's all-reduces are not counted."""

    def open_channel(self, name: str, pairs: Sequence[tuple[int, int]]) -> None:
        """Make communicators; the first call on each waits for the peer's."""
        if name in self._channels:
            return
        header, everyone = f"open channel{name}", range(self.world_size)

        def make() -> None:
            self._meet(f"channel{name}", everyone, "here", header)
            self._channels[name] = dist.new_group(list(everyone), timeout=self._torch_timeout)

        with self._calling(header):
            self._watchdog.call(make, header, [nccl_watchdog.group_channel(everyone)], everyone)
        with self.in_channel(name):
            for source, destination in pairs:
                first = torch.zeros(1, device=self.device)
                sends = [(destination, first)] if source == self.rank else []
                self.exchange(sends, [(source, first)] if destination == self.rank else [], 0, header)

    @contextmanager
    def in_channel(self, name: str) -> Iterator[None]:
        self._channel = name
        try:
            yield
        finally:
            self._channel = ""

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        """Start all sends and receives of one exchange."""
        both_ways = {peer for peer, _ in sends} & {peer for peer, _ in receives}
        calls = [_Call(self.rank, peer, peer, dist.isend, memory) for peer, memory in copied(sends, _copied_bytes)]
        calls += [_Call(peer, self.rank, peer, dist.irecv, _memory_of(out)) for peer, out in receives]
        one_way = sorted((call for call in calls if call.peer not in both_ways), key=lambda call: call[:2])
        with self._calling(header):
            received = self._start_batch([call for call in calls if call.peer in both_ways], header)
            for call in one_way:  # the first call on a communicator waits for the peer's: one order for all
                group = None if call.source < call.destination else self._downward
                group = self._channels[self._channel] if self._channel else group
                pending = self._call(partial(call.function, call.memory, call.peer, group=group), header, [call])
                if call.destination == self.rank:
                    received.append(pending)
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)

        return partial(self._wait, received, header)

    def _start_batch(self, calls: list[_Call], header: str) -> list[Pending]:
        """Start calls of one exchange together. ``init`` has met all ranks before, which torch requires."""
        if not calls:
            return []
        batch = [dist.P2POp(call.function, call.memory, call.peer) for call in calls]
        return [self._call(lambda: dist.batch_isend_irecv(batch)[0], header, calls)]

    def _call(self, function: Callable[[], Any], header: str, calls: list[_Call]) -> Pending:
        channels = dict.fromkeys(
            nccl_watchdog.send_channel(call.source, call.destination) + self._channel for call in calls
        )
        return self._watchdog.call(function, header, list(channels), [call.peer for call in calls])

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        dtype = tensors[0].dtype
        wide = (_SUMMED_IN if reduction == "sum" else _COMPARED_IN).get(dtype, dtype)
        is_copied = len(tensors) > 1 or wide == dtype  # NCCL writes the total there
        total = (pack(tensors) if is_copied else tensors[0].detach().reshape(-1)).to(wide)
        numel, drops_nan = total.numel(), reduction != "sum" and wide.is_floating_point
        if drops_nan:  # to NCCL the larger one of a number and NaN is the number
            is_nan = total.isnan().to(wide)
            total = torch.cat([total, is_nan if reduction == "max" else -is_nan])
        call = partial(dist.all_reduce, total, _REDUCE_OPS[reduction])
        wait = self._start_collective(call, group, f"{header}, {reduction} of {numel}")

        def finish() -> torch.Tensor:
            wait()
            result = total[:numel].masked_fill(total[numel:] != 0, math.nan) if drops_nan else total
            return result.to(dtype)

        return finish

    def start_all_gather(
        self, part: torch.Tensor, sizes: Sequence[int], group: Sequence[int], header: str
    ) -> Callable[[], torch.Tensor]:
        own, dtype = _bytes_of(part), part.dtype
        out = own.new_empty(sum(sizes) * part.itemsize)
        parts = out.split([size * part.itemsize for size in sizes])
        is_even = len(set(sizes)) == 1
        call = partial(dist.all_gather_into_tensor, out, own) if is_even else partial(dist.all_gather, [*parts], own)
        wait = self._start_collective(call, group, f"{header}, all-gather of {sum(sizes)}")

        def finish() -> torch.Tensor:
            wait()
            return out.view(dtype)

        return finish

    def start_reduce_scatter(
        self, terms: Sequence[torch.Tensor], group: Sequence[int], header: str
    ) -> Callable[[], torch.Tensor]:
        dtype, sizes = terms[0].dtype, [term.numel() for term in terms]
        whole = pack(terms).to(_SUMMED_IN.get(dtype, dtype))
        total = whole.new_empty(sizes[list(group).index(self.rank)])
        if len(set(sizes)) == 1:
            call = partial(dist.reduce_scatter_tensor, total, whole, dist.ReduceOp.SUM)
        else:
            call = partial(dist.reduce_scatter, total, list(whole.split(sizes)), dist.ReduceOp.SUM)
        wait = self._start_collective(call, group, f"{header}, reduce-scatter of {sum(sizes)}")

        def finish() -> torch.Tensor:
            wait()
            return total.to(dtype)

        return finish

    def _start_collective(self, call: Callable[..., Any], group: Sequence[int], header: str) -> Callable[[], None]:
        def start() -> Any:
            return call(group=self._group(tuple(group), header), async_op=True)

        with self._calling(header):
            pending = self._watchdog.call(start, header, [nccl_watchdog.group_channel(group)], group)
        return partial(self._wait, [pending], header)

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        all_ranks, call = range(self.world_size), partial(dist.all_gather, parts, tensor, async_op=True)
        channels = [nccl_watchdog.group_channel(all_ranks)]
        with self._calling(header):
            pending = self._watchdog.call(call, f"{header}, all-gather of {tensor.numel()}", channels, all_ranks)
        count = 0
        while not pending.has_ended:
            count += 1
            if count < _NUM_YIELDS:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S)
            self._raise_if_aborted(header)
        self._wait([pending], header)
        return parts

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

    def _group(self, ranks: tuple[int, ...], header: str) -> dist.ProcessGroup | None:
        """The process group of ``ranks``. Its members alone create it, so stages may create groups in any order.

        torch names it by how many groups the process has, and members with unlike names would wait for each other: the
        others first create groups of themselves alone, which NCCL does not hear of.
        """
        key = tuple(sorted(ranks))
        if key not in self._groups:
            num_groups = map(int, self._meet(f"group {key}", key, str(count_groups()), header))
            for members in [[self.rank]] * (max(num_groups) - count_groups()) + [list(key)]:
                group = dist.new_group(members, timeout=self._torch_timeout, use_local_synchronization=True)
            self._groups[key] = group
        return self._groups[key]

    def _meet(self, name: str, ranks: Sequence[int], text: str, header: str) -> list[str]:
        """The texts of ranks that make a group next. Nothing ends torch's own wait for them; an abort ends this one."""
        last_s = self._torch_timeout.total_seconds()
        return self._rendezvous.gather(name, self.rank, ranks, text, last_s, lambda: self._raise_if_aborted(header))

    def _wait(self, calls: Sequence[Pending], header: str) -> None:
        """Order the current stream after the calls, without blocking this thread. An abort ends calls without data.

        Afterwards nothing of them is held but a position of the stream: the host may be far ahead of the device, and
        torch's handles would keep all results until then.
        """
        with self._calling(header):
            for call in calls:
                for work in call.works or ():
                    work.wait()
                call.works = () if self.device.type == "cpu" else (StreamPosition(self.device),)
        self._raise_if_aborted(header)

    @contextmanager
    def _calling(self, header: str) -> Iterator[None]:
        """Context of calls and waits. The watchdog may abort at any moment, and torch refuses calls after that. A
        failure of NCCL, such as a lost connection, ends the world.
        """
        self._raise_if_aborted(header)
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DistBackendError):
                self.abort(f"NCCL reports {reason_of(error)}")
            self._raise_if_aborted(header)
            raise

    def _raise_if_aborted(self, header: str) -> None:
        if self._abort_reason is not None:
            raise CollectiveAborted(f"rank {self.rank} stopped in {header}: {self._abort_reason}")


def count_groups() -> int:
    """How many process groups this process has."""
    return len(distributed_c10d._world.pg_names)


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
