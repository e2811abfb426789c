"""Seconds of a schedule: the result of ``simulate``, without a table of actions.

Every stage takes the same time for every micro-batch. The tables are therefore recurrences over rounds, with one
forward and one backward per rank, and a round is a few operations on arrays of all ranks. Once a round adds the same
time to all ranks, all later rounds do so too and are skipped. ``table_makespan`` has those without a recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.core.strategy import ResolvedStrategy
from workbench.cost.table_makespan import table_makespan_s
from workbench.pipeline.schedules import Action, Table, make_table
from workbench.pipeline.simulate import Duration, Span, Timeline, running_order, simulate

_NEVER = -1.0e300


def makespan_s(
    schedule: str,
    num_ranks: int,
    num_micro_batches: int,
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    transfer_s: float = 0.0,
    alone_speedup: float = 1.0,
) -> float:
    """Seconds from the first action's start to the last one's end.

    Args:
        schedule: its name.
        num_ranks: slices of the pipeline axis.
        num_micro_batches: per step.
        forward_s, input_s, weight_s: by stage: forward, backward of inputs, backward of weights.
        transfer_s: from the end of an action until another rank has its result.
        alone_speedup: above 1, ranks share cores. Seconds hold while all ranks work. A rank that works alone is this
            many times as fast; several ranks together are never faster than all.

    >>> makespan_s("1f1b", 2, 4, [1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    15.0

    Two stages on one core gain nothing:

    >>> makespan_s("1f1b", 2, 4, [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], alone_speedup=2.0)
    12.0
    """
    f, i, w = (np.asarray(seconds, float) for seconds in (forward_s, input_s, weight_s))
    if len(f) == 1 or num_ranks == 1:
        return float(num_micro_batches * (f + i + w).sum())
    if alone_speedup > 1:
        table = make_table(schedule, len(f), num_micro_batches, num_ranks)
        durations = _duration(forward_s, input_s, weight_s)
        return _on_shared_cores(alone_speedup, table, len(f), durations, transfer_s).makespan_s
    if schedule == "gpipe":
        return _all_forwards_first(f, i + w, num_micro_batches, transfer_s)
    if schedule == "zero_bubble":
        return _one_forward_one_backward(f, i, w, num_micro_batches, transfer_s)
    if schedule in ("1f1b", "interleaved"):
        if len(f) > num_ranks:
            return _interleaved(f.reshape(-1, num_ranks), (i + w).reshape(-1, num_ranks), num_micro_batches, transfer_s)
        return _one_forward_one_backward(f, i + w, np.zeros_like(w), num_micro_batches, transfer_s)
    return table_makespan_s(schedule, num_ranks, num_micro_batches, {"F": f, "B": i + w, "I": i, "W": w}, transfer_s)


def timeline_of(
    strategy: ResolvedStrategy,
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    transfer_s: float = 0.0,
    alone_speedup: float = 1.0,
) -> Timeline:
    """The timeline action by action, for pictures; as long as ``makespan_s``. It takes about 10 us per action."""
    table = make_table(strategy.schedule, strategy.num_stages, strategy.num_micro_batches, strategy.degrees[0])
    durations = _duration(forward_s, input_s, weight_s)
    if alone_speedup > 1 and len(table) > 1:
        return _on_shared_cores(alone_speedup, table, strategy.num_stages, durations, transfer_s)
    return simulate(table, strategy.num_stages, durations, transfer_s)


def _on_shared_cores(
    alone_speedup: float, table: Table, num_stages: int, duration: Duration, transfer_s: float
) -> Timeline:
    """The timeline if ranks share cores: a waiting rank leaves its share to the others. It takes some 10 us per action
    and rank.
    """
    num_ranks = len(table)
    waits_for = {action: others for _, action, others in running_order(table, num_stages)}
    arrives: dict[Action, float] = {}  # at other ranks
    left = [[duration(action) for action in actions] for actions in table]
    begins: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in table]
    place, now = [0] * num_ranks, 0.0
    while any(place[rank] < len(table[rank]) for rank in range(num_ranks)):
        active: list[tuple[int, float]] = []
        later: list[tuple[int, float]] = []
        for rank, actions in enumerate(table):
            if place[rank] == len(actions):
                continue
            others = waits_for[actions[place[rank]]]
            if all(other in arrives for other in others):
                start = max([now, *(arrives[other] for other in others)])
                (active if start <= now else later).append((rank, start))
        speed = min(alone_speedup, num_ranks / len(active)) if active else 1.0
        ends = [now + left[rank][place[rank]] / speed for rank, _ in active]
        soonest = min([*ends, *(start for _, start in later)])
        for (rank, _), end in zip(active, ends, strict=True):
            action = table[rank][place[rank]]
            begins.setdefault(action, now)
            left[rank][place[rank]] -= (soonest - now) * speed
            if end == soonest:
                arrives[action] = soonest + transfer_s
                spans[rank].append(Span(rank, action, begins[action], soonest))
                place[rank] += 1
        now = soonest
    return Timeline(tuple(map(tuple, spans)))


def _duration(forward_s: Sequence[float], input_s: Sequence[float], weight_s: Sequence[float]) -> Duration:
    seconds = {"F": forward_s, "I": input_s, "W": weight_s}

    def duration(action: Action) -> float:
        if action.kind == "B":
            return input_s[action.stage] + weight_s[action.stage]
        return seconds[action.kind][action.stage]

    return duration


def _all_forwards_first(f: np.ndarray, b: np.ndarray, m: int, transfer_s: float) -> float:
    """GPipe: a flow shop with equal jobs, both ways: every stage once, and the slowest stage for the other jobs."""
    hops = 2 * (len(f) - 1) * transfer_s
    return float(f.sum() + b.sum() + (m - 1) * (f.max() + b.max()) + hops)


def _one_forward_one_backward(f: np.ndarray, i: np.ndarray, w: np.ndarray, m: int, transfer_s: float) -> float:
    """1F1B and zero bubble. In round r, stage s of p does forward r + p - s - 1, backward r, weights of r - s.

    A forward waits for the forward of the stage before in the round before. Backwards go from the last stage to the
    first within the round, which is a running maximum.
    """
    p = len(f)
    stage = np.arange(p)
    lead = p - 1 - stage
    chain = np.cumsum(i[::-1]) + transfer_s * stage
    head = chain - i[::-1]
    free, sent = np.zeros(p), np.zeros(p)
    r = 1 - p
    while r < m:
        doing = (r + lead >= 0) & (r + lead < m)
        arrived = np.concatenate(([_NEVER], sent[:-1] + transfer_s))
        sent, before = np.where(doing, np.maximum(free, arrived) + f, sent), (sent, free)
        free = np.where(doing, sent, free)
        if r >= 0:
            free = (chain + np.maximum.accumulate(free[::-1] - head))[::-1] + np.where(r >= stage, w, 0.0)
        skipped = m - p - r  # rounds in which every stage does all of its three
        if r >= p and skipped > 0 and (step := _same_step((sent, free), before)) is not None:
            sent, free, r = sent + skipped * step, free + skipped * step, r + skipped
        r += 1
    return float((free + w * np.minimum(stage, m)).max())


def _interleaved(f: np.ndarray, b: np.ndarray, m: int, transfer_s: float) -> float:
    """Interleaved 1F1B. Rows of ``f`` and ``b`` are virtual stages, columns are ranks.

    Forwards have the same order on all ranks, and so do backwards; slots number them. Rank r of p does backward slot i
    after forward slot i + its lead. At tick t = i - r, all inputs were made at tick t - 1, by the rank before or after
    it.
    """
    virtual_stages, p = f.shape
    rank, round_ = np.arange(p), virtual_stages * p
    num_slots = -(-m // p) * round_
    lead = (virtual_stages - 1) * p + 2 * (p - 1 - rank)
    free, sent, returned = np.zeros(p), np.zeros(p), np.zeros(p)
    saved: tuple[np.ndarray, ...] = ()
    t = -int(lead[0])
    while t < num_slots:
        slot = t + rank + lead
        virtual_stage = slot // p % virtual_stages
        real = (slot >= 0) & (slot < num_slots) & (slot // round_ * p + slot % p < m)
        arrived = np.roll(sent, 1) + transfer_s
        arrived[0] = arrived[0] if virtual_stage[0] else _NEVER
        new_sent = np.where(real, np.maximum(free, arrived) + f[virtual_stage, rank], sent)
        free = np.where(real, new_sent, free)
        slot = t + rank
        virtual_stage = virtual_stages - 1 - slot // p % virtual_stages
        real = (slot >= 0) & (slot < num_slots) & (slot // round_ * p + slot % p < m)
        arrived = np.roll(returned, -1) + transfer_s
        arrived[-1] = arrived[-1] if virtual_stage[-1] < virtual_stages - 1 else _NEVER
        returned = np.where(real, np.maximum(free, arrived) + b[virtual_stage, rank], returned)
        free, sent = np.where(real, returned, free), new_sent
        t += 1
        if t > 0 and t % round_ == 0:
            skipped = (m // p * round_ - t - int(lead[0]) - p) // round_
            if saved and skipped > 0 and (step := _same_step((sent, returned, free), saved)) is not None:
                sent, returned, free = (state + skipped * step for state in (sent, returned, free))
                t += skipped * round_
            saved = (sent, returned, free)
    return float(free.max())


def _same_step(now: tuple[np.ndarray, ...], before: tuple[np.ndarray, ...]) -> float | None:
    """The growth of all elements, if it is the same for all."""
    steps = np.concatenate([a - b for a, b in zip(now, before, strict=True)])
    return float(steps[0]) if float(np.ptp(steps)) <= 1e-9 * abs(float(steps[0])) else None
