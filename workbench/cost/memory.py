"""Memory of a stage's fullest rank at the step's peak, by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.core.strategy import ResolvedStrategy
from workbench.cost.stages import StagePrice
from workbench.pipeline.check import max_live_micro_batches
from workbench.pipeline.schedules import make_table

_FORMULAS = ("gpipe", "1f1b", "interleaved", "zero_bubble")
"""Schedules that are known here; of others the table is made and counted."""


def live_micro_batches(strategy: ResolvedStrategy) -> list[float]:
    """For every stage, of how many micro-batches its activations are alive when its rank has most of them.

    Stages that share a rank are not full at the same time. Where a table is counted, what the rank holds at most is
    spread over them evenly.
    """
    m, ranks, stages = strategy.num_micro_batches, strategy.degrees[0], strategy.num_stages
    if strategy.schedule not in _FORMULAS:
        table = make_table(strategy.schedule, stages, m, ranks)
        most = [max_live_micro_batches(table[stage % ranks]) for stage in range(stages)]
        return [number * ranks / stages for number in most]
    if strategy.schedule == "gpipe":
        return [float(m)] * stages
    if strategy.schedule == "zero_bubble":
        return [float(min(m, stages))] * stages
    if stages == ranks:
        return [float(min(m, ranks - stage)) for stage in range(stages)]
    return [_live_of_interleaved(stage, ranks, stages // ranks, m) for stage in range(stages)]


def _live_of_interleaved(stage: int, ranks: int, laps: int, m: int) -> float:
    """After all forwards of its rank's start and one more: they go through its stages, ``group`` at a time."""
    lap, rank = divmod(stage, ranks)
    group = min(m, ranks)
    forwards = min((laps - 1) * group + 2 * (ranks - rank - 1) + 1, m * laps)
    rounds, rest = divmod(forwards, laps * group)
    return float(min(m, rounds * group + min(group, max(0, rest - lap * group))))


def memory_of(stages: Sequence[StagePrice], alive: Sequence[float], num_ranks: int) -> tuple[Mapping[str, float], ...]:
    """Bytes by kind for every stage; a rank with several stages has the sum of theirs."""
    rows = []
    for stage, live in zip(stages, alive, strict=True):
        rows.append(
            {
                "parameters": stage.parameters,
                "gradients": stage.gradients,
                "optimizer": stage.optimizer,
                "activations": live * stage.kept_bytes + stage.transient_bytes,
                "buffers": stage.gathered_bytes,
            }
        )
    if len(stages) == num_ranks:
        return tuple(rows)
    together = []
    for slice_ in range(num_ranks):
        mine = range(slice_, len(stages), num_ranks)
        kinds = {kind: sum(rows[s][kind] for s in mine) for kind in rows[0]}
        spare = sum(stages[s].transient_bytes for s in mine) - max(stages[s].transient_bytes for s in mine)
        together.append({**kinds, "activations": kinds["activations"] - spare})
    return tuple(together)


__all__ = ["live_micro_batches", "memory_of"]
