"""Runs a function for every rank, one after the other, or in threads where local functions exchange rows; and compares
the results with those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from workbench.errors import CollectiveAborted
from workbench.tensors.simulated import Simulated
from workbench.tensors.world import World
from workbench.transport.threads import ThreadHub, ThreadTransport

T = TypeVar("T")


def run_each(run: Callable[[int], T], worlds: Sequence[World]) -> list[T]:
    """``run(rank)`` for every rank, by rank. Nearly always nobody waits for another, and then threads cost too much."""
    hub = _connect(worlds)
    hub.abort("this rank runs alone")
    try:
        return [_as_rank(run, world) for world in worlds]
    except CollectiveAborted:
        hub = _connect(worlds)
    with ThreadPoolExecutor(len(worlds)) as pool:
        started = [pool.submit(_as_rank_of_hub, run, world, hub) for world in worlds]
    failures = [error for error in (future.exception() for future in started) if error is not None]
    if failures:
        raise next((error for error in failures if not isinstance(error, CollectiveAborted)), failures[0])
    return [future.result() for future in started]


def _connect(worlds: Sequence[World]) -> ThreadHub:
    hub = ThreadHub(len(worlds))
    for world in worlds:
        world.transport = ThreadTransport(hub, world.rank)
        world.context.num_edges.clear()  # an earlier attempt that failed may have left different counts
    return hub


def _as_rank(run: Callable[[int], T], world: World) -> T:
    with Simulated(world):
        return run(world.rank)


def _as_rank_of_hub(run: Callable[[int], T], world: World, hub: ThreadHub) -> T:
    try:
        return _as_rank(run, world)
    except BaseException as error:
        hub.abort(f"rank {world.rank} raised {type(error).__name__}: {error}")
        raise
    finally:
        hub.end(world.rank)


def redrawn(operand: torch.Tensor, special: float | None, generator: torch.Generator) -> torch.Tensor:
    """An operand of the same shape; floats in double precision, so that nothing small passes for rounding.

    Floats are normally distributed; with ``special``, they are positive and one has that value: a term that is zero
    must not meet an infinity, nor be divided by zero. Integers are given in another order, as most are indices, and
    with ``special`` all but one are equal.
    """
    if operand.numel() == 0:
        return operand
    place = int(torch.randint(0, operand.numel(), (), generator=generator))
    if operand.is_floating_point() or operand.is_complex():
        fresh = torch.randn(operand.shape, generator=generator, dtype=torch.float64)
        if special is not None:
            fresh = fresh.abs()
            fresh.reshape(-1)[place] = special
        return fresh if operand.is_floating_point() else fresh.to(operand.dtype)
    flat = operand.reshape(-1)
    if special is None:
        return flat[torch.randperm(operand.numel(), generator=generator)].reshape(operand.shape)
    lowest, highest = (flat.amin(), flat.amax()) if operand.dtype != torch.bool else torch.tensor([False, True])
    few, many = (highest, lowest) if special == 0 else (lowest, highest)
    fresh = many.expand_as(flat).clone()
    fresh[place] = few
    return fresh.reshape(operand.shape)
