"""A profile of whatever an engine trains next: begun by one call of the notebook, fetched by a later one."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from workbench.core.profile import RankPart
from workbench.tensors.world import World, current
from workbench.training.profiling.rank_profiler import RankProfiler

_armed: WeakKeyDictionary[World, RankProfiler] = WeakKeyDictionary()


def begin(steps: int, warmup: int, any_size: bool) -> None:
    """Profile the next steps, in place of an earlier profile that is not done. All ranks call it."""
    world = current()
    earlier = _armed.pop(world, None)
    if earlier is not None:
        earlier.end()
    profiler = RankProfiler(world, steps, warmup, any_size)
    profiler.begin()
    _armed[world] = profiler


def take() -> tuple[int, RankPart | None]:
    """How many steps have ended, and this rank's part of the profile. All ranks call it, between cells.

    A profile with some of its steps ends here: what the next cell does would be a long time after. One without begins
    anew. The part is None without a profile, and where it has no step.
    """
    profiler = _armed.get(current())
    if profiler is None:
        return 0, None
    profiler.end()
    part = profiler.part()
    if part is not None:
        del _armed[current()]
    else:
        begin(profiler.num_wanted, profiler.warmup, profiler.any_size)
    return profiler.num_ended, part
