"""Runs a function for every rank: one after the other, or in threads where local functions exchange rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
