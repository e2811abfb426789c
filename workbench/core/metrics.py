"""What a training run reports: one record per step and rank while it runs, one record per run when it has ended.

Engines publish these, figures and tables read them; neither needs torch for it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Kinds of live storage that are counted on every rank, in the order in which they are drawn."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One training step as one rank saw it.

    ``loss`` is the logical loss, the same on every rank, or None where it was not fetched in this step.
    ``memory_bytes`` maps the kinds of ``MEMORY_KINDS`` and ``"peak"`` (the process's peak resident size above its
    warm baseline) to bytes on this rank. ``boxed_bytes`` counts what this rank sent to other ranks in the step.
    """

    rank: int
    step: int
    num_steps: int
    time_s: float
    samples: int
    loss: float | None = None
    memory_bytes: dict[str, int] = field(default_factory=dict)
    boxed_bytes: int = 0
    boxing_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepMetrics:
        """The record that ``to_dict`` wrote; unknown keys are ignored so that old files load."""
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One finished run of one strategy, over all ranks.

    ``samples_per_s`` is the batch size over the median step time, warm-up steps left out; ``speedup`` is over one
    engine. Tuples ``peak_memory_bytes`` and ``memory_by_kind`` have one entry per rank. ``loss_difference`` and
    ``weight_difference`` are the largest absolute differences to one device; ``equal`` says whether the run passed.
    A run that failed has its reason in ``error`` and empty figures.
    """

    name: str
    strategy: str
    num_ranks: int
    batch_size: int
    losses: tuple[float, ...] = ()
    step_times_s: tuple[float, ...] = ()
    samples_per_s: float = 0.0
    speedup: float | None = None
    peak_memory_bytes: tuple[int, ...] = ()
    memory_by_kind: tuple[dict[str, int], ...] = ()
    boxed_bytes_per_step: int = 0
    loss_difference: float | None = None
    weight_difference: float | None = None
    equal: bool | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunRecord:
        """The record that ``to_dict`` wrote; unknown keys are ignored so that old files load."""
        known: dict[str, Any] = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        for key, value in known.items():
            known[key] = tuple(value) if isinstance(value, list) else value
        return cls(**known)
