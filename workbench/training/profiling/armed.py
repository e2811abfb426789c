"""A profile of whatever an engine trains next: begun by one call of the notebook, fetched by a later one."""

from __future__ import annotations

from workbench.core.profile import RankPart
from workbench.tensors.world import current
from workbench.training.profiling.rank_profiler import RankProfiler

_armed: RankProfiler | None = None


def begin(steps: int, warmup: int, any_size: bool) -> None:
    """Profile the next steps, in place of an earlier profile that is not done. All ranks call it."""
    global _armed
    if _armed is not None:
        _armed.end()
    _armed = None
    profiler = RankProfiler(current(), steps, warmup, any_size)
    profiler.begin()
    _armed = profiler


def take() -> tuple[int, RankPart | None]:
    """How many steps have ended, and this rank's part of the profile, which ends. All ranks call it, between cells.

    The part is None where it has no step, and on an engine that is new since the profile was begun.
    """
    global _armed
    if _armed is None:
        return 0, None
    profiler, _armed = _armed, None
    profiler.end()
    return profiler.num_ended, profiler.part()
