"""The recurrences of schedules say what running their tables action by action says."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from workbench.core.options import SCHEDULES, V_SCHEDULES, Options
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.cost import table_makespan
from workbench.cost.memory import live_micro_batches
from workbench.cost.schedule import makespan_s
from workbench.pipeline.schedules import GENERATORS, Action, make_table
from workbench.pipeline.simulate import simulate


def simulated(
    schedule: str, ranks: int, m: int, f: list[float], i: list[float], w: list[float], transfer: float
) -> float:
    def duration(action: Action) -> float:
        s = action.stage
        return {"F": f[s], "I": i[s], "W": w[s], "B": i[s] + w[s]}[action.kind]

    return simulate(make_table(schedule, len(f), m, ranks), len(f), duration, transfer).makespan_s


CASES = [
    (schedule, ranks, virtual_stages, m, seed)
    for schedule in SCHEDULES
    for ranks in (1, 2, 3, 5)
    for virtual_stages in ((1, 2, 3) if schedule == "interleaved" else (2,) if schedule in V_SCHEDULES else (1,))
    for m in (1, 2, 3, 7, 10, 40)
    for seed in (0, 1)
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_makespan_is_that_of_the_simulated_table(schedule: str) -> None:
    for _, ranks, virtual_stages, m, seed in (case for case in CASES if case[0] == schedule):
        draw = random.Random(f"{ranks} {virtual_stages} {m} {seed}")
        f, i, w = ([draw.uniform(0.2, 2) if seed else 1.0 for _ in range(ranks * virtual_stages)] for _ in range(3))
        transfer = draw.uniform(0, 0.5) if seed else 0.0
        expected = simulated(schedule, ranks, m, f, i, w, transfer)
        assert makespan_s(schedule, ranks, m, f, i, w, transfer) == pytest.approx(expected, rel=1e-9), (
            ranks,
            virtual_stages,
            m,
        )


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual_stages", "m"),
    [("1f1b", 8, 1, 64), ("interleaved", 4, 3, 64), ("zero_bubble_v", 4, 2, 64), ("dualpipe_v", 4, 2, 64)],
)
def test_skipped_rounds_lose_nothing(schedule: str, ranks: int, virtual_stages: int, m: int) -> None:
    draw = random.Random(0)
    for _ in range(3):
        f, b = ([draw.uniform(1, 1.5) for _ in range(ranks * virtual_stages)] for _ in range(2))
        w = [draw.uniform(0.5, 1.5) if schedule in V_SCHEDULES else 0.0 for _ in f]
        expected = simulated(schedule, ranks, m, f, b, w, 0.05)
        assert makespan_s(schedule, ranks, m, f, b, w, 0.05) == pytest.approx(expected, rel=1e-9)


def test_a_schedule_without_a_recurrence_runs_its_table(monkeypatch) -> None:
    """A new one needs none; here it is zero bubble under another name."""
    mine = lambda name, *sizes: make_table({"mine": "zero_bubble"}[name], *sizes)  # noqa: E731
    monkeypatch.setattr(table_makespan, "make_table", mine)
    seconds = [1.0, 1.5], [0.5, 1.0], [0.25, 0.5]
    assert makespan_s("mine", 2, 4, *seconds, 0.1) == pytest.approx(makespan_s("zero_bubble", 2, 4, *seconds, 0.1))
    assert makespan_s("mine", 2, 4, *seconds, 0.1) != pytest.approx(makespan_s("1f1b", 2, 4, *seconds, 0.1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_that_share_cores_take_between_their_bounds(name: str) -> None:
    """One core: all work, one after the other. As many cores as ranks: the makespan. Between: not below either."""
    draw = random.Random(name)
    for ranks, virtual_stages, m in ((1, 1, 3), (2, 1, 4), (4, 1, 4), (3, 2, 6), (4, 1, 9), (2, 2, 5)):
        if virtual_stages not in {"interleaved": (1, 2)}.get(name, (1 + (name in V_SCHEDULES),)):
            continue
        f, i, w = ([draw.uniform(0.2, 2) for _ in range(ranks * virtual_stages)] for _ in range(3))
        transfer = draw.uniform(0, 0.1)
        work = m * sum(f + i + w) / ranks
        alone = makespan_s(name, ranks, m, f, i, w, transfer)
        barely = 1 + 1e-12  # simulated, not by recurrences
        assert makespan_s(name, ranks, m, f, i, w, transfer, barely) == pytest.approx(alone)
        assert makespan_s(name, ranks, m, f, i, w, alone_speedup=max(barely, ranks)) == pytest.approx(work)
        some = makespan_s(name, ranks, m, f, i, w, transfer, 1.7)
        assert max(work, alone / 1.7) - 1e-9 <= some <= alone + 1e-9


def test_a_pipeline_of_two_cores_fills_one_core_after_the_other() -> None:
    """Four stages, one micro-batch: one rank is at work at any time, on a core of its own."""
    ones = [1.0] * 4
    assert makespan_s("gpipe", 4, 1, ones, ones, ones, alone_speedup=2.0) == pytest.approx(12 / 2)


def test_bubble_of_equal_stages_is_the_formula() -> None:
    """(p - 1) / m of the work under 1F1B, divided by the virtual_stages where they interleave. (arXiv 2104.04473.)"""
    for virtual_stages in (1, 2, 4):
        ranks, m = 8, 32
        f, b = [1.0 / virtual_stages] * ranks * virtual_stages, [2.0 / virtual_stages] * ranks * virtual_stages
        took = makespan_s("interleaved" if virtual_stages > 1 else "1f1b", ranks, m, f, b, [0.0] * len(f))
        assert took == pytest.approx(3 * m + 3 * (ranks - 1) / virtual_stages)


def test_64_stages_and_512_micro_batches_take_milliseconds() -> None:
    draw = random.Random(1)
    f, b = ([draw.uniform(1, 1.2) for _ in range(64)] for _ in range(2))
    started = time.process_time()
    makespan_s("1f1b", 64, 512, f, b, [0.0] * 64, 0.01)
    assert time.process_time() - started < 0.5  # some 15 ms; simulate() takes a hundred times that


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), [("interleaved", 2), ("interleaved", 3), ("zero_bubble_v", 2), ("dualpipe_v", 2)]
)
def test_what_stages_keep_is_what_their_table_has_at_its_fullest(
    ranks: int, schedule: str, virtual_stages: int
) -> None:
    stages = ranks * virtual_stages
    layers = tuple(ResolvedLayer(str(stage), "data", None, stage) for stage in range(stages))
    for m in (1, 2, ranks, ranks + 1, 2 * ranks, 3 * ranks, 5 * ranks):
        resolved = ResolvedStrategy(layers, (ranks, 1, 1), Options((ranks, 1, 1), m, schedule))
        found = live_micro_batches(resolved)
        for own, actions in zip(resolved.stages_by_slice(), make_table(schedule, stages, m, ranks), strict=True):
            live, fullest = Counter[int](), Counter[int]()
            for action in actions:
                live[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
                fullest = live.copy() if live.total() > fullest.total() else fullest
            assert [found[stage] for stage in own] == [fullest[stage] for stage in own], (m, own)


def test_memory_of_a_schedule_of_ones_own_is_counted_from_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GENERATORS, "mine", GENERATORS["gpipe"])
    layers = tuple(ResolvedLayer(str(stage), "data", None, stage) for stage in range(3))
    live = [
        live_micro_batches(ResolvedStrategy(layers, (3, 1, 1), Options((3, 1, 1), 5, name)))
        for name in ("mine", "gpipe", "1f1b")
    ]
    assert live[0] == live[1] == [5, 5, 5] != live[2]
