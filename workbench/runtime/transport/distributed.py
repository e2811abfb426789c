"""torch.distributed: gloo between CPU ranks, NCCL between GPUs.

Slices travel point to point (exact counts, no padding), sums by the library's own all-reduce. No wait blocks the main
thread in C++, where a stuck gloo operation ignores SIGINT: collectives are polled from Python, receives are left to a
helper thread, because gloo tells of their completion nowhere but in a blocking wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from workbench.core.boxing import LinkCost
from workbench.errors import CollectiveAborted
from workbench.runtime.transport.base import (
    ACCUMULATED_IN_32_BITS,
    Message,
    Release,
    Wanted,
    borrow_by_exchange,
    pack,
)
from workbench.runtime.transport.waiting import POLL_S, Helper

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# A waiting rank that yields for long takes the core from gloo's own threads: with 466 kB on 2 ranks and 2 cores an
# all-reduce took 2.6 ms under 2000 yields, 0.7 ms under 100 yields and naps of 50 us.
_NUM_SPINS = 20
_NUM_YIELDS = 100
_SLEEP_S = 50e-6
_TAG_RANGE = 1 << 30


class DistributedTransport:
    """The ranks of a torch.distributed process group.

    ``cost`` is a fixed constant per backend: decisions that follow from it must be the same on all ranks.
    """

    def __init__(self, rank: int, world_size: int, backend: str, timeout_s: float, device: torch.device) -> None:
        self.name, self.device = backend, device
        self.cost = LinkCost(400e-6, 1.5e9) if backend == "gloo" else LinkCost(20e-6, 100e9)
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(world_size)): None}
        self._receiver, self._sender = Helper("workbench-receive"), Helper("workbench-send")
        self._last_send: Any = None
        self._abort_reason: str | None = None

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> None:
        if self.name == "nccl":
            self._exchange_batched(sends, receives, header)
            return
        tag %= _TAG_RANGE
        sends = [(destination, tensor.contiguous()) for destination, tensor in sends]
        works = [dist.irecv(out, source, tag=tag) for source, out in receives]
        for destination, tensor in sends:
            self._send(tensor, destination, tag)
        peers = f"ranks {[source for source, _ in receives]}"
        if works:
            self._wait_in_helper(lambda: [work.wait() for work in works if work is not None], peers, header)

    def _send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Start a send; its buffer lives until a helper thread has seen it leave."""
        work = dist.isend(tensor, destination, tag=tag)
        if work is not None:
            self._last_send = self._sender.submit(lambda: _see_off(work, [tensor]))

    def _exchange_batched(self, sends: Sequence[Message], receives: Sequence[Message], header: str) -> None:
        """NCCL has no tags: sends and receives of one exchange go in one group call."""
        operations = [dist.P2POp(dist.isend, tensor.contiguous(), destination) for destination, tensor in sends]
        operations += [dist.P2POp(dist.irecv, out, source) for source, out in receives]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()  # orders the current stream after the transfer; does not block this thread

    def borrow(
        self, sends: Sequence[Message], wanted: Sequence[Wanted], dtype: torch.dtype, tag: int, header: str
    ) -> tuple[list[torch.Tensor], Release]:
        return borrow_by_exchange(self, self.device, sends, wanted, dtype, tag, header)

    def all_reduce(
        self, tensor: torch.Tensor, group: Sequence[int], reduction: str, tag: int, header: str
    ) -> torch.Tensor:
        return self.start_all_reduce([tensor], group, reduction, tag, header)().view(tensor.shape)

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        total, dtype = pack(tensors), tensors[0].dtype
        if reduction == "sum" and dtype in ACCUMULATED_IN_32_BITS:
            total = total.float()
        work = dist.all_reduce(total, _REDUCE_OPS[reduction], group=self._group(tuple(group)), async_op=True)

        def finish() -> torch.Tensor:
            if self.name == "nccl":
                work.wait()  # orders the current stream after the sum; does not block this thread
            else:
                self._wait(work, f"ranks {list(group)}", header)
            return total.to(dtype)

        return finish

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        work = dist.all_gather(parts, tensor, async_op=True)
        self._wait(work, "all ranks", header)
        return parts

    def flush(self) -> None:
        started = time.perf_counter()
        while self._last_send is not None and not self._last_send.finished.wait(POLL_S):
            self._raise_if_hopeless(started, "a receiver", "flush")
        self._last_send = None

    def abort(self, reason: str) -> None:
        self._abort_reason = reason

    def close(self) -> None:
        self._last_send = None

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of ``ranks``; made by its members alone, so pipelines may need it in different orders."""
        key = tuple(sorted(ranks))
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(key), use_local_synchronization=True)
        return self._groups[key]

    def _wait(self, work: dist.Work, peers: str, header: str) -> None:
        """Poll a collective: spin, then yield, then sleep."""
        started, count = time.perf_counter(), 0
        while not work.is_completed():
            count += 1
            if count < _NUM_SPINS:
                continue
            if count < _NUM_SPINS + _NUM_YIELDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)
                self._raise_if_hopeless(started, peers, header)
        with self._lost(peers, header):
            work.wait()  # completed: raises what the other side did to it

    def _wait_in_helper(self, block: Any, peers: str, header: str) -> None:
        started = time.perf_counter()
        with self._lost(peers, header):
            self._receiver.run(block, lambda: self._raise_if_hopeless(started, peers, header))

    @contextmanager
    def _lost(self, peers: str, header: str) -> Iterator[None]:
        """torch's errors about a broken connection, said in our words."""
        try:
            yield
        except CollectiveAborted:
            raise
        except RuntimeError as error:
            raise CollectiveAborted(f"rank {self.rank} lost {peers} in {header}: {error}") from error

    def _raise_if_hopeless(self, started: float, peers: str, header: str) -> None:
        reason = self._abort_reason
        if reason is None and time.perf_counter() - started > self.timeout_s:
            reason = f"nothing came for {self.timeout_s:g} s"
        if reason is not None:
            self._abort_reason = None
            raise CollectiveAborted(f"rank {self.rank} stopped waiting for {peers} in {header}: {reason}")


def _see_off(work: dist.Work, buffer: list[torch.Tensor]) -> None:
    """Wait until a send has left, and hold its buffer until then."""
    work.wait()
    buffer.clear()
