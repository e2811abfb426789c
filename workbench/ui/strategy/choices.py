"""The choice of a layer, and the degrees of a strategy, in the panel's words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of a layer, as a row says it: ``parallel``, then how or over how many ranks, if it says that.

    ``"model"`` and ``"column"``, ``"row"`` or None; ``"expert"`` and a number of ranks or None; ``"data"`` and None.
    """

    parallel: str
    split: str | None = None
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.parallel}:{self.split}" if self.split else self.parallel


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks = pipeline stages x data axis x model axis."""

    pipeline: int
    data: int
    model: int

    @property
    def num_ranks(self) -> int:
        """The product of the degrees."""
        return self.pipeline * self.data * self.model
