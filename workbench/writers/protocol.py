"""What a writer is: a function that begins a run's log, and an object that takes its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class RunWriter(Protocol):
    """The log of one run. One thread begins it, adds to it and closes it."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write values of a step, counted from 1. A step may come twice, with other names."""

    def close(self, error: str | None) -> None:
        """End the log of a run that has finished, or that has failed for this reason."""


Writer = Callable[[str, Mapping[str, Any]], RunWriter]
"""(name of the run, its settings) -> the run's log. Any function of this form can be given as ``log=``."""
