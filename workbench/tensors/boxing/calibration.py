"""Measures what exchanges cost in this world; all ranks agree on the figures."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import torch

from workbench.core.boxing import LinkCost
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import broadcast, split
from workbench.tensors.boxing.exchange import exchange_between
from workbench.tensors.global_tensor import local_torch, spec_of
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World, current

_BYTES = 4 * 2**20
_NUM_SMALL, _NUM_LARGE = 15, 5
_WARM_UP = 2


def calibrate() -> LinkCost:
    """Measure what exchanges cost in this world, and let boxing decide by it from now on. All ranks call it.

    Plans and paths are priced by constants of the transport unless this has been called. Every rank times gathers of
    a few bytes and of 4 MiB (some 20 ms over shared memory); all take the slowest rank's figures, since what is
    decided by them must be equal everywhere. Numbers stay the same bit by bit: a path changes what travels, not the
    order in which terms are added. ``wb.rebuild`` returns to the constants, which ranks that are new there have too.

    Returns:
        Seconds to start an exchange, and bytes per second that a rank then receives.

    ``print(wb.planner.calibrate())`` after ``wb.init()``, or in a ``%%global`` cell.

    Raises:
        CollectiveAborted: another rank is in another call, or has gone.
    """
    world = current()
    if world.world_size == 1:
        return world.transport.cost
    cost = _agreed(world, _measure(world))
    world.forget_decisions()
    world.transport.cost = cost
    return cost


def _measure(world: World) -> LinkCost:
    """This rank's own figures."""
    small_s = _time_gather(world, world.world_size, _NUM_SMALL)
    numel = _BYTES // 4
    large_s = _time_gather(world, numel, _NUM_LARGE)
    received = _BYTES * (world.world_size - 1) / world.world_size
    return LinkCost(small_s, received / max(large_s - small_s, 1e-9))


def _time_gather(world: World, numel: int, num_times: int) -> float:
    """Median seconds until this rank has all of a tensor that was split."""
    placement = Placement.of(world.device.type, list(range(world.world_size)))
    source, target = (spec_of(world, Layout(placement, (entry,)), (numel,)) for entry in (split(0), broadcast))
    exchange = exchange_between(source, target, torch.float32)
    times = []
    with local_torch():
        local = torch.zeros(source.local_shape, device=world.device)
        for _ in range(_WARM_UP + num_times):
            started = time.perf_counter()
            exchange.run(local, world.context.next_tag())
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            times.append(time.perf_counter() - started)
    return median(times[_WARM_UP:])


def _agreed(world: World, measured: LinkCost) -> LinkCost:
    """The slowest rank's figures, on every rank."""
    every = all_gather_object(measured, world, "calibrate()")
    latency_s, bandwidth = max(each.latency_s for each in every), min(each.bandwidth_bytes_per_s for each in every)
    return replace(world.transport.cost, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
