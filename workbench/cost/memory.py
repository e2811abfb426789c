"""Memory of a stage's fullest rank at the step's peak, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from workbench.core.options import V_SCHEDULES
from workbench.core.strategy import ResolvedStrategy
from workbench.cost.peaks import Alive
from workbench.cost.stages import StagePrice
from workbench.pipeline.check import live_when_fullest, most_postponed
from workbench.pipeline.schedules import make_table

_FORMULAS = ("gpipe", "1f1b", "interleaved", "zero_bubble", *V_SCHEDULES)
"""Schedules with a formula. For others, the live micro-batches are counted in the table."""


def live_micro_batches(strategy: ResolvedStrategy) -> list[float]:
    """For each stage, the number of micro-batches with live activations when its rank has most of them.

    Stages that share a rank are not full at the same time.
    """
    m, ranks, stages = strategy.num_micro_batches, strategy.degrees[0], strategy.num_stages
    if stages == 1:  # micro-batches run one after the other
        return [1.0]
    if strategy.schedule not in _FORMULAS:
        return list(_counted_in_table(strategy.schedule, stages, m, ranks))
    if strategy.schedule == "gpipe":
        return [float(m)] * stages
    if strategy.schedule == "zero_bubble":
        return [float(min(m, stages))] * stages
    if strategy.schedule in V_SCHEDULES:
        fewer = strategy.schedule == "zero_bubble_v"  # by one before the turn
        return [float(min(m, stages - stage - (fewer and stage < ranks))) for stage in range(stages)]
    if stages == ranks:
        return [float(min(m, ranks - stage)) for stage in range(stages)]
    return [_live_of_interleaved(stage, ranks, stages // ranks, m) for stage in range(stages)]


def postponed_micro_batches(strategy: ResolvedStrategy) -> list[float]:
    """For each stage, the number of micro-batches whose gradients of weights wait, when its rank has most of them: at
    the end of a backward of inputs.
    """
    m, ranks, stages = strategy.num_micro_batches, strategy.degrees[0], strategy.num_stages
    if stages == 1 or strategy.schedule in ("gpipe", "1f1b", "interleaved"):
        return [0.0] * stages
    if strategy.schedule == "zero_bubble":  # the backwards of the first stage are whole
        return [float(min(stage + 1, m)) if stage else 0.0 for stage in range(stages)]
    return list(_counted_in_table(strategy.schedule, stages, m, ranks, is_postponed=True))


@lru_cache(maxsize=1024)
def _counted_in_table(
    schedule: str, stages: int, num_micro_batches: int, ranks: int, is_postponed: bool = False
) -> list[float]:
    """By stage, from the table; in a V, three times as many micro-batches as ranks tell all."""
    few = min(num_micro_batches, 3 * ranks) if schedule in V_SCHEDULES else num_micro_batches
    table = make_table(schedule, stages, few, ranks)
    found: Counter[int] = Counter()
    for actions in table:
        found += (most_postponed if is_postponed else live_when_fullest)(actions)
    return [float(found[stage]) for stage in range(stages)]


def _live_of_interleaved(stage: int, ranks: int, virtual_stages: int, m: int) -> float:
    """The number after all forwards of the rank's start and one more. They pass its stages ``group`` at a time."""
    virtual_stage, rank = divmod(stage, ranks)
    group = min(m, ranks)
    forwards = min((virtual_stages - 1) * group + 2 * (ranks - rank - 1) + 1, m * virtual_stages)
    rounds, rest = divmod(forwards, virtual_stages * group)
    return float(min(m, rounds * group + min(group, max(0, rest - virtual_stage * group))))


def memory_of(
    stages: Sequence[StagePrice],
    alive: Sequence[float],
    postponed: Sequence[float],
    num_micro_batches: int,
    slices: Sequence[Sequence[int]],
) -> tuple[Mapping[str, float], ...]:
    """Bytes by kind of every rank of the pipeline axis, which has the stages of ``slices``, at the fullest moment of
    its step.

    That moment is in the first backward, in a later one, in the last one, at the end of a backward of inputs, which
    frees nothing, or while the optimizer steps. A rank with several stages is assumed to have all gradients when it is
    fullest.
    """
    return tuple(_fullest(stages, mine, alive, postponed, num_micro_batches) for mine in slices)


def _fullest(
    stages: Sequence[StagePrice],
    mine: Sequence[int],
    alive: Sequence[float],
    postponed: Sequence[float],
    num_micro_batches: int,
) -> Mapping[str, float]:
    moments = [Alive(0.0, sum(stages[s].gradients for s in mine), sum(stages[s].peaks.update_bytes for s in mine))]
    for stage in mine:
        others = [s for s in mine if s != stage]
        kept = sum(alive[s] * stages[s].kept_bytes for s in others)
        kept += sum(max(0.0, postponed[s] - (s == stage)) * stages[s].postponed_bytes for s in mine)
        gradients = sum(stages[s].gradients for s in others)
        peaks, live = stages[stage].peaks, alive[stage]
        found = [(peaks.later, min(num_micro_batches - 1, live)), (peaks.first, live), (peaks.last, 1.0)]
        if others:
            found = [(peaks.later, live)]
        elif num_micro_batches == 1:
            found = [(peaks.last, 1.0)]
        for peak, how_many in found:
            before = max(0.0, how_many - 1) * stages[stage].kept_bytes
            moments.append(Alive(peak.activations + before + kept, peak.gradients + gradients, peak.buffers))
    if any(postponed[s] for s in mine):
        kept = sum(alive[s] * stages[s].kept_bytes + postponed[s] * stages[s].postponed_bytes for s in mine)
        has_gradients = len(mine) > 1 or num_micro_batches > alive[mine[0]]
        moments.append(Alive(kept, sum(stages[s].gradients for s in mine) if has_gradients else 0.0))
    peak = max(moments, key=sum)
    return {
        "parameters": sum(stages[s].parameters for s in mine),
        "gradients": peak.gradients,
        "optimizer": sum(stages[s].optimizer for s in mine),
        "activations": peak.activations,
        "buffers": peak.buffers,
    }
