"""What a run has reported so far, kept small: per-step arrays, and for each rank its latest memory and time split."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from workbench.core.metrics import StepMetrics
from workbench.ui.decimate import MAX_POINTS, decimate
from workbench.ui.figures import boxing_shares, live_bytes

_STEPS_IN_SPLIT = 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment, ready to be drawn: curves have at most 1000 points; memory and shares are by rank.

    Steps are counted from 1 here, as people do; records count them from 0.
    """

    num_steps: int
    last_step: int
    rate_steps: np.ndarray
    samples_per_s: np.ndarray
    loss_steps: np.ndarray
    losses: np.ndarray
    memory_by_kind: tuple[dict[str, int], ...]
    peak_bytes: tuple[int, ...]
    boxing_shares: tuple[float, ...]

    @property
    def latest_rate(self) -> float | None:
        """Samples per second in the last step, None before the first."""
        return float(self.samples_per_s[-1]) if len(self.samples_per_s) else None

    @property
    def latest_loss(self) -> float | None:
        """The last loss that was fetched, None before the first."""
        return float(self.losses[-1]) if len(self.losses) else None


class History:
    """Collects ``StepMetrics`` of all ranks. Not every step is reported; one takes as long as its slowest rank."""

    def __init__(self, num_steps: int, num_ranks: int, batch_size: int) -> None:
        self._batch_size = batch_size
        self._times_s = np.full(num_steps, np.nan)
        self._losses = np.full(num_steps, np.nan)
        self._memory: list[dict[str, int]] = [{} for _ in range(num_ranks)]
        self._recent = [deque[StepMetrics](maxlen=_STEPS_IN_SPLIT) for _ in range(num_ranks)]
        self._last_step = 0

    def add(self, metrics: Iterable[StepMetrics]) -> None:
        """Take in new records, in any order of ranks."""
        for record in metrics:
            self._add_one(record)

    def _add_one(self, record: StepMetrics) -> None:
        self._times_s[record.step] = np.fmax(self._times_s[record.step], record.time_s)
        if record.loss is not None:
            self._losses[record.step] = record.loss
        if record.memory_bytes:
            self._memory[record.rank] = record.memory_bytes
        self._recent[record.rank].append(record)
        self._last_step = max(self._last_step, record.step + 1)

    def snapshot(self, max_points: int = MAX_POINTS) -> Snapshot:
        """The state now, decimated to ``max_points`` per curve."""
        steps = np.arange(1, self._last_step + 1)
        times_s = self._times_s[: self._last_step]
        rates = self._batch_size / np.where(times_s > 0, times_s, np.nan)
        rate_steps, samples_per_s = decimate(steps, rates, max_points)
        loss_steps, losses = decimate(steps, self._losses[: self._last_step], max_points)
        shares = boxing_shares([record for recent in self._recent for record in recent])
        return Snapshot(
            num_steps=len(self._times_s),
            last_step=self._last_step,
            rate_steps=rate_steps,
            samples_per_s=samples_per_s,
            loss_steps=loss_steps,
            losses=losses,
            memory_by_kind=tuple(dict(memory) for memory in self._memory),
            peak_bytes=tuple(memory.get("peak", live_bytes(memory)) for memory in self._memory),
            boxing_shares=tuple(shares.get(rank, 0.0) for rank in range(len(self._memory))),
        )
