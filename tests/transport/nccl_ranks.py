"""Worlds whose ranks are threads and exchange over the played NCCL."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from torch.distributed import HashStore

from tests.transport.played_nccl import PlayedNccl
from tests.transport.shared_ranks import run_on_threads
from workbench import testing
from workbench.tensors import world as worlds_module
from workbench.tensors.simulated import Simulated
from workbench.tensors.world import World, run_backward_in_calling_thread
from workbench.transport.network import distributed, nccl_watchdog
from workbench.transport.network.distributed import DistributedTransport
from workbench.transport.rendezvous import Member, Rendezvous

CPU = torch.device("cpu")


class _Transport(DistributedTransport):
    def abort(self, reason):
        distributed.dist.join(self.rank)  # the watchdog has a thread of its own
        super().abort(reason)


def rendezvous_of(num_ranks, pids=None):
    return Rendezvous(HashStore(), 0, tuple(Member("alpha", pid, 1) for pid in pids or [os.getpid()] * num_ranks))


def run_played(fn, num_ranks, *, device=CPU, pids=None, timeout_s=60.0, finds_stalls=True):
    """``fn(transport, rank)`` on every rank; returns what each returned or raised, and what was played.

    Args:
        pids: by rank, of the processes whose end ends a rank.
        finds_stalls: see ``PlayedNccl``.
    """
    nccl, rendezvous = (
        PlayedNccl([f"gpu {rank}" for rank in range(num_ranks)], finds_stalls),
        rendezvous_of(num_ranks, pids),
    )

    def program(rank):
        nccl.join(rank)
        transport = None
        try:
            transport = _Transport(rank, num_ranks, "nccl", timeout_s, device, rendezvous)
            transport.all_gather(torch.zeros(1, device=device), "init()")
            return fn(transport, rank)
        finally:
            if transport is not None:
                transport.close()
            nccl.end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "dist", nccl)
        patch.setattr(distributed, "abort_calls", nccl.abort)
        patch.setattr(distributed, "count_groups", nccl.num_groups)
        patch.setattr(nccl_watchdog, "SUSPECT_S", 0.1)
        patch.setattr(nccl_watchdog, "LOOK_S", 0.02)
        return run_on_threads(program, num_ranks), nccl


def run_over_nccl(program, num_ranks=2, *, device=CPU, worlds: Sequence[World] | None = None, **options):
    """``program(rank)`` on ranks of a world; returns what each returned or raised.

    Args:
        worlds: by rank, the worlds of ranks that have been in one before and join the next; None for a new rank.
    """

    def in_world(transport, rank):
        world = worlds[rank] if worlds else None
        if world is None:
            world = World(rank, num_ranks, device, transport)
        else:
            world.transport = transport
            world.num_rebuilds += 1
            world.context.forget_progress()
            for forget in worlds_module._at_rebuild:
                forget()
        run_backward_in_calling_thread(device)
        world.context.generator = torch.Generator().manual_seed(testing._SEED)
        with Simulated(world):
            try:
                return program(rank)
            except KeyboardInterrupt:
                world.abort("KeyboardInterrupt")
                raise

    results, nccl = run_played(in_world, num_ranks, device=device, **options)
    if not any(isinstance(result, BaseException) for result in results):
        assert nccl.open_calls() == []
    return results
