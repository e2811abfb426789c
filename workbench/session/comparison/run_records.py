"""Computes the record of a run from the reports of its ranks. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from workbench.core.metrics import RunRecord, Segment
from workbench.training.runs.job import WARM_UP_STEPS, RankResult


@dataclass(frozen=True)
class AnnouncedStrategy:
    """A strategy to which a run is to change: its name in tables, and the figures that are predicted for it."""

    name: str
    predicted: Mapping[str, float] = field(default_factory=dict)


def measured_record(
    name: str,
    text: str,
    reports: Sequence[RankResult],
    num_ranks: int,
    batch_size: int,
    reference: RankResult | None,
    settings: Mapping[str, Any],
) -> RunRecord:
    """A run's losses, times, memory and traffic, without a verdict.

    Args:
        text: the strategy.
        reports: one per rank.
        batch_size: samples per step.
        reference: the one-device run that the speed-up refers to; None for no speed-up.
    """
    slowest = [max(times) for times in zip(*(report.step_times_s for report in reports), strict=False)]
    samples = reports[0].samples[: len(slowest)]
    rate = samples_per_s(slowest, samples, batch_size)
    return RunRecord(
        name,
        text,
        num_ranks,
        batch_size,
        tuple(reports[0].losses),
        tuple(slowest),
        rate,
        _speedup(rate, slowest, reference, batch_size),
        tuple(report.memory_bytes["peak"] for report in reports),
        tuple(_without_peak(report.memory_bytes) for report in reports),
        sum(report.boxed_bytes for report in reports),
        layer_forward_s=_slowest([report.layer_forward_s for report in reports]),
        layer_backward_s=_slowest([report.layer_backward_s for report in reports]),
        settings=dict(settings),
        started=now_text(),
        samples=tuple(samples),
    )


def segments_of(
    planned: RunRecord, run: RunRecord, reports: Sequence[RankResult], announced: Mapping[str, AnnouncedStrategy]
) -> tuple[Segment, ...]:
    """The figures of each strategy of a run that had several."""
    first = (0, AnnouncedStrategy(planned.name, planned.predicted), planned.strategy)
    changes = ((step, announced.get(text, AnnouncedStrategy(text)), text) for step, text in reports[0].changes)
    begun = [first, *changes]
    stops = [*(step for step, *_ in begun[1:]), len(run.step_times_s)]
    measured = zip(*(report.segments for report in reports), strict=True)
    return tuple(
        Segment(
            start,
            strategy.name,
            text,
            samples_per_s(run.step_times_s[start:stop], run.samples[start:stop], planned.batch_size)
            if stop > start
            else 0.0,
            tuple(rank.memory_bytes["peak"] for rank in ranks),
            tuple(_without_peak(rank.memory_bytes) for rank in ranks),
            sum(rank.boxed_bytes for rank in ranks),
            predicted=dict(strategy.predicted),
        )
        for (start, strategy, text), stop, ranks in zip(begun, stops, measured, strict=False)
    )


def samples_per_s(times_s: Sequence[float], samples: Sequence[int], batch_size: int) -> float:
    """The rate of the median step after warm-up: of its ``samples``, fewer than ``batch_size`` at an epoch's end."""
    median = statistics.median
    return median(_warm(samples) or samples or [batch_size]) / median(_warm(times_s) or times_s)


def _warm(steps: Sequence[float]) -> Sequence[float]:
    return steps[WARM_UP_STEPS + 1 :]


def _speedup(rate: float, times_s: Sequence[float], reference: RankResult | None, batch_size: int) -> float | None:
    """Over the one-device run; None without one, and where only one of the two has steps after warm-up."""
    if reference is None or bool(_warm(times_s)) != bool(_warm(reference.step_times_s)):
        return None
    return rate / samples_per_s(reference.step_times_s, reference.samples, batch_size)


def now_text() -> str:
    """The local time with its zone, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _without_peak(memory_bytes: Mapping[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in memory_bytes.items() if kind != "peak"}


def _slowest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By layer, in the order of the ranks that hold them: the seconds of the slowest rank."""
    names = dict.fromkeys(name for seconds in ranks for name in seconds)
    return {name: max(seconds.get(name, 0.0) for seconds in ranks) for name in names}
