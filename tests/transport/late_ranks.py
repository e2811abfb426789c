"""Ranks that are threads of one process and exchange over ``ipc``, each on a fake device of its own."""

from __future__ import annotations

import torch

from tests.transport import late_device
from tests.transport.shared_ranks import ThreadGather, run_on_threads
from workbench.tensors.simulated import Simulated
from workbench.tensors.world import World
from workbench.transport.ipc import connect as ipc_connect
from workbench.transport.ipc import pool

CPU = torch.device("cpu")


def connect_on_threads(fn, num_ranks=2, behaviours=None, timeout_s=20.0):
    """``fn(connection, rank)`` on every rank; returns what each returned or raised."""
    gather, before = ThreadGather(num_ranks), dict(ipc_connect.DEVICE_TYPES)
    by_thread = {}

    def program(rank):
        import threading

        by_thread[threading.get_ident()] = rank
        connection = ipc_connect.connect(gather.of(rank), rank, num_ranks, timeout_s, CPU)
        try:
            return fn(connection, rank)
        finally:
            if connection.transport is not None:
                connection.transport.close()

    def make(device):
        import threading

        behaviour = behaviours[by_thread[threading.get_ident()]] if behaviours else None
        return late_device.LateDevice(device, behaviour)

    late_device.mistakes.clear()
    ipc_connect.DEVICE_TYPES["cpu"] = make
    try:
        results = run_on_threads(program, num_ranks)
    finally:
        ipc_connect.DEVICE_TYPES.clear()
        ipc_connect.DEVICE_TYPES.update(before)
    assert late_device.mistakes == [], late_device.mistakes
    assert pool.free_deferred() == 0, "memory of a broken world is kept"
    return results


def run_late(fn, num_ranks=2, behaviours=None, timeout_s=20.0):
    """``fn(transport, rank)`` on every rank of a world that has connected."""

    def program(connection, rank):
        assert connection.transport is not None, connection.refusals
        return fn(connection.transport, rank)

    return connect_on_threads(program, num_ranks, behaviours, timeout_s)


def run_late_worlds(fn, num_ranks=2):
    """``fn(world)`` on every rank."""

    def program(transport, rank):
        world = World(rank, num_ranks, CPU, transport)
        with Simulated(world):
            return fn(world)

    return run_late(program, num_ranks)
