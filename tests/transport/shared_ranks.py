"""Ranks that are threads of one process but exchange through real shared memory, each with mappings of its own."""

from __future__ import annotations

import threading

import torch

import workbench.tensors.install  # noqa: F401 - installs the patches of torch
from tests.timeouts import WAIT_TIMEOUT_S
from workbench.tensors.simulated import Simulated
from workbench.tensors.world import World
from workbench.transport import selection


class ThreadGather:
    """All-gathers tensors of one shape, as a process group does; ``of(rank)`` is one rank's function."""

    def __init__(self, num_ranks):
        self._barrier = threading.Barrier(num_ranks, timeout=WAIT_TIMEOUT_S)
        self._parts = [None] * num_ranks

    def of(self, rank):
        def gather(tensor):
            self._parts[rank] = tensor.clone()
            self._barrier.wait()
            parts = [part.clone() for part in self._parts]
            self._barrier.wait()
            return parts

        return gather


def run_on_threads(fn, num_ranks):
    """``fn(rank)`` on one thread per rank; returns what each returned or raised."""
    results = [None] * num_ranks

    def run(rank):
        try:
            results[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=WAIT_TIMEOUT_S)
    return results


def run_shared(fn, num_ranks=2, timeout_s=WAIT_TIMEOUT_S):
    """``fn(transport, rank)`` on every rank; returns what each returned or raised."""
    gather = ThreadGather(num_ranks)

    def program(rank):
        transport, refusals, _ = selection.connect(gather.of(rank), rank, num_ranks, timeout_s)
        assert transport is not None, refusals
        try:
            return fn(transport, rank)
        finally:
            transport.close()

    return run_on_threads(program, num_ranks)


def run_in_worlds(fn, num_ranks=2):
    """``fn(world)`` on ranks that are threads and exchange through real shared memory."""

    def program(transport, rank):
        world = World(rank, num_ranks, torch.device("cpu"), transport)
        with Simulated(world):
            return fn(world)

    return run_shared(program, num_ranks)


def assert_all_returned(results):
    """Assert that no rank raised, and return the results."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
