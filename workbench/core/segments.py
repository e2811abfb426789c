"""A run whose strategy changed on the way, as one record per strategy: what tables and pictures compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from workbench.core.metrics import RunRecord, Segment
from workbench.core.verdict import UNKNOWN, WEIGHT_STEPS

ARROW = "\u2192"


def by_strategy(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """The runs, and in the place of one whose strategy changed a record for each of its strategies.

    Names say of which run they are, and of which steps: ``"data, steps 1-40"``, ``"data \u2192 model, steps 41-100"``.
    """
    return [part for run in runs for part in _parts(run)]


def _parts(run: RunRecord) -> list[RunRecord]:
    if not run.segments:
        return [run]
    stops = [*(segment.first_step for segment in run.segments[1:]), len(run.step_times_s)]
    parts = zip(run.segments, stops, strict=True)
    return [_part(run, number, one, stop) for number, (one, stop) in enumerate(parts) if stop > one.first_step]


def _part(run: RunRecord, number: int, segment: Segment, stop: int) -> RunRecord:
    start, is_last = segment.first_step, number == len(run.segments) - 1
    names = [run.name, segment.name][: number + 1]
    part = replace(
        run,
        name=f"{f' {ARROW} '.join(names)}, steps {start + 1}-{stop}",
        strategy=segment.strategy,
        losses=run.losses[start:stop],
        step_times_s=run.step_times_s[start:stop],
        samples=run.samples[start:stop],
        samples_per_s=segment.samples_per_s,
        speedup=run.speedup * segment.samples_per_s / run.samples_per_s if run.speedup and run.samples_per_s else None,
        peak_memory_bytes=segment.peak_memory_bytes,
        memory_by_kind=segment.memory_by_kind,
        boxed_bytes_per_step=segment.boxed_bytes_per_step,
        bubble=segment.bubble,
        layer_forward_s=run.layer_forward_s if is_last else {},
        layer_backward_s=run.layer_backward_s if is_last else {},
        predicted=segment.predicted,
        changes=(),
        segments=(),
        first_step=start,
        run_id=f"{run.run_id}#{number + 1}" if run.run_id else "",
    )
    verdict = segment.verdict or (run.verdict if start < run.verdict.num_steps else UNKNOWN)
    if verdict is run.verdict:
        return part
    return replace(
        part,
        loss_difference=verdict.largest,
        weight_difference=run.weight_difference if verdict.num_steps >= WEIGHT_STEPS else None,
        equal=verdict.equal,
        verdict=verdict,
    )
