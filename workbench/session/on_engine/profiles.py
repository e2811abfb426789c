"""What the notebook calls on an engine for ``%workbench profile``. It loads torch when it is called."""

from __future__ import annotations

from workbench.core.profile import RankPart


def begin_profile(steps: int, warmup: int, any_size: bool) -> None:
    """See ``training.profiling.armed.begin``."""
    from workbench.training.profiling import armed

    armed.begin(steps, warmup, any_size)


def take_profile() -> tuple[int, RankPart | None]:
    """See ``training.profiling.armed.take``."""
    from workbench.training.profiling import armed

    return armed.take()
