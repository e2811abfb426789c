"""What one training step of a strategy takes and holds: the one cost model that planner, panel and tables share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workbench.pipeline.simulate import Timeline


@dataclass(frozen=True)
class Estimate:
    """Of one step, on the slowest rank; parts add up to ``step_s``.

    Attributes:
        step_s: seconds from batch to updated weights.
        compute_s: forward, backward and what is computed again.
        boxing_s: exchanges of activations and their gradients between layers that nothing hides.
        gradient_s: sums of gradients over data-parallel ranks (and gathers of ZeRO) that nothing hides.
        bubble_s: waiting for other stages.
        optimizer_s: the update.
        memory: bytes by kind (``core.metrics.MEMORY_KINDS``) of every stage's fullest rank, at the step's peak.
        boxed_bytes: that all ranks together send in a step.
        samples_per_s: batch over step.
        timeline: the schedule on paper, a rank per stage.
    """

    step_s: float
    compute_s: float
    boxing_s: float
    gradient_s: float
    bubble_s: float
    optimizer_s: float
    memory: tuple[Mapping[str, float], ...]
    boxed_bytes: float
    samples_per_s: float
    timeline: Timeline | None = field(default=None, compare=False, repr=False)

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return max((sum(kinds.values()) for kinds in self.memory), default=0.0)


__all__ = ["Estimate"]
