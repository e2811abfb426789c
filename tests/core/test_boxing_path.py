"""Boxing paths against a search through all paths, against the oracle, and against what they are allowed to cost."""

import itertools
import random
from functools import cache

import numpy as np
import pytest

from tests.core.test_boxing_plan import execute
from tests.oracle import assert_holds, coordinates, shard
from workbench.core import boxing_path, boxing_prices
from workbench.core.boxing import BoxingPlan, LinkCost, plan_boxing
from workbench.core.boxing_path import WORTHWHILE, BoxingPath, find_boxing_path, merge_axes
from workbench.core.boxing_prices import BoxingPrices
from workbench.core.layout import Layout
from workbench.core.placement import Placement

GRIDS = [[0, 1, 2, 3], [[0, 1], [2, 3]], [0], [1, 2], [4, 5, 6], [[4, 5], [6, 7]], [[3, 0], [4, 1]], [2, 3, 4, 5]]
LINKS = [LinkCost(1.0, 1.0), LinkCost(20.0, 1.0), LinkCost(5.0, 1.0, one_shot_bytes=200)]
SHAPES = [(8, 8), (6, 5), (3, 40), (1, 9)]


def layouts(grid, shape, reduction="P"):
    placement = Placement.of("cpu", grid)
    entries = [*(f"S({dim})" for dim in range(len(shape))), "B", reduction]
    return [Layout.of(placement, list(sbp)) for sbp in itertools.product(entries, repeat=placement.num_axes)]


def sampled_pairs(count, seed):
    chance = random.Random(seed)
    for _ in range(count):
        shape, link = chance.choice(SHAPES), chance.choice(LINKS)
        source, target = (chance.choice(layouts(chance.choice(GRIDS), shape)) for _ in range(2))
        yield source, target, shape, link


@cache
def price(source, target, shape, link):
    """Counted from the moves themselves; an all-reduce as its own two steps, or as one in which all get all terms."""
    plan = plan_boxing(source, target, shape, 1)
    if plan.kind == "all-reduce":
        size, ranks = max(np.prod(source.local_shape(shape, r)) for r in source.placement), len(plan.groups[0])
        if ranks <= 2 or size <= link.one_shot_bytes:
            return link.time_s((ranks - 1) * size)
        largest = -(-size // ranks)
        return link.time_s(size + (ranks - 2) * largest) + link.latency_s * (size > 0)
    sent, received = {}, {}
    for move in plan.moves:
        if move.source != move.destination:
            sent[move.source] = sent.get(move.source, 0) + move.num_elements
            received[move.destination] = received.get(move.destination, 0) + move.num_elements
    return link.time_s(max([0, *sent.values(), *received.values()]))


def best_of_all_paths(source, target, shape, link):
    between = {
        layout
        for placement in (source.placement, target.placement)
        for layout in layouts(placement.ranks, shape)
        if not layout.has_partial and layout not in (source, target)
    }
    times = [price(source, target, shape, link)]
    first = {x: price(source, x, shape, link) for x in between}
    last = {x: price(x, target, shape, link) for x in between}
    times += [first[x] + last[x] for x in between]
    best = min(times)
    if target.has_partial:  # then at most one layout in between
        return best
    for a, b in itertools.permutations(between, 2):
        if first[a] + last[b] < best:
            best = min(best, first[a] + price(a, b, shape, link) + last[b])
    return best


@pytest.mark.parametrize("seed", range(3))
def test_the_path_is_the_cheapest_of_all_paths(seed):
    """Steps that cost next to nothing are worth a tenth of the direct exchange, see ``WORTHWHILE``."""
    num_paths = 0
    for source, target, shape, link in sampled_pairs(60, seed):
        if merge_axes(source, target, shape) != (source, target):
            continue
        found, direct = find_boxing_path(source, target, shape, 1, link), price(source, target, shape, link)
        best = best_of_all_paths(source, target, shape, link)
        expected = best if best < WORTHWHILE * direct * (1 - 1e-9) else direct
        assert found.time_s(link) == pytest.approx(expected), f"{found}\nbest {best}, direct {direct}"
        num_paths += isinstance(found, BoxingPath)
    assert num_paths > 3


def test_prices_are_those_of_the_plans_and_bounds_are_below():
    for source, target, shape, link in sampled_pairs(300, seed=9):
        prices, plan = BoxingPrices(shape, 1, link), plan_boxing(source, target, shape, 1)
        low = prices.at_least_s(prices.summary(source), prices.summary(target))
        assert prices.time_s(source, target) == pytest.approx(plan.time_s(link)), str(plan)
        assert plan.time_s(link) == pytest.approx(price(source, target, shape, link)), str(plan)
        assert low <= prices.time_s(source, target) * (1 + 1e-12), str(plan)


def test_paths_give_the_right_shards():
    num_steps = set()
    for source, target, shape, link in sampled_pairs(300, seed=4):
        full = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
        found, shards = find_boxing_path(source, target, shape, 1, link), shard(full, source)
        for step in found.steps:
            shards = execute(step, shards)
            assert_holds(shards, step.destination, full, atol=0)
        assert found.layouts[0] == source and found.layouts[-1] == target if len(found.steps) > 1 else True
        assert found.wire_bytes == sum(found.bytes_sent.values())
        num_steps.add(len(found.steps))
    assert num_steps >= {1, 2}


def test_a_path_gives_the_bits_of_the_direct_exchange():
    chance, num_paths = np.random.default_rng(0), 0
    for source, target, shape, link in sampled_pairs(300, seed=6):
        found = find_boxing_path(source, target, shape, 1, link)
        if target.has_partial or len(found.steps) == 1:
            continue
        shards = {rank: chance.standard_normal(source.local_shape(shape, rank)) for rank in source.placement}
        for ranks in copies(source):
            shards |= dict.fromkeys(ranks, shards[ranks[0]])
        steps, direct = shards, execute(plan_boxing(source, target, shape, 1), shards)
        for step in found.steps:
            steps = execute(step, steps)
        assert all((steps[rank] == direct[rank]).all() for rank in target.placement), str(found)
        num_paths += source.has_partial
    assert num_paths > 20


def copies(layout):
    """Ranks that hold the same."""
    groups = {}
    for rank, place in coordinates(layout).items():
        key = tuple(-1 if repr(entry) == "B" else c for entry, c in zip(layout.sbp, place, strict=True))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def one_axis(*ranks):
    return Placement.of("cpu", list(ranks))


def test_three_steps():
    """Three ranks that have all of it and four that need it: slices along one dim to send, along another to gather."""
    link, target = LinkCost(0.1, 1.0), Layout.of(Placement.of("cpu", [[4, 5], [6, 7]]), "B, B")
    found = find_boxing_path(Layout.of(one_axis(1, 2, 3), "B"), target, (5, 7), 1, link)
    assert len(found.steps) == 3
    assert found.time_s(link) == pytest.approx(
        best_of_all_paths(found.source, merge_axes(target, target, (5, 7))[0], (5, 7), link)
    )


LINK = LinkCost(20e-6, 4e9)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((one_axis(0, 1, 2, 3), "P"), (one_axis(4, 5, 6, 7), "B"), 2),
        ((one_axis(0), "B"), (one_axis(1, 2, 3, 4), "B"), 2),
        ((Placement.of("cpu", [[0, 1], [2, 3]]), "P, S(0)"), (Placement.of("cpu", [[0, 1], [2, 3]]), "B, B"), 2),
        ((one_axis(0, 1, 2, 3), "S(0)"), (one_axis(0, 1, 2, 3), "B"), 1),
        ((one_axis(0, 1, 2, 3), "S(0)"), (one_axis(4, 5, 6), "S(1)"), 1),
        ((one_axis(0, 1, 2, 3), "P"), (one_axis(0, 1, 2, 3), "B"), 1),
    ],
)
def test_known_paths(source, target, expected):
    found = find_boxing_path(Layout.of(*source), Layout.of(*target), (512, 512), 4, LINK)
    assert len(found.steps) == expected, str(found)


def test_small_tensors_go_directly():
    a, b = Layout.of(one_axis(0, 1, 2, 3), "P"), Layout.of(one_axis(4, 5, 6, 7), "B")
    assert isinstance(find_boxing_path(a, b, (16, 16), 4, LINK), BoxingPlan)


def test_the_search_looks_at_few_boxings(monkeypatch):
    """Work is counted, not timed: how many boxings are priced, for every pair of one- and two-axis layouts."""
    made = []
    monkeypatch.setattr(boxing_path, "BoxingPrices", lambda *args: made.append(BoxingPrices(*args)) or made[-1])
    find_boxing_path.cache_clear()
    for source, target, _, _ in sampled_pairs(400, seed=2):
        find_boxing_path(source, target, (1024, 1024), 4, LINK)
    assert max(prices.num_priced for prices in made) <= 60
    made.clear()
    same = one_axis(0, 1, 2, 3)
    for a, b in itertools.product(["S(0)", "S(1)", "B", "P"], repeat=2):
        find_boxing_path(Layout.of(same, a), Layout.of(same, b), (1024, 1024), 4, LINK)
    assert sum(prices.num_priced for prices in made) == 0
    before = find_boxing_path.cache_info().hits
    find_boxing_path(Layout.of(same, "P"), Layout.of(same, "B"), (1024, 1024), 4, LINK)
    assert find_boxing_path.cache_info().hits == before + 1


def test_thousands_of_ranks_are_sampled(monkeypatch):
    counted = []
    monkeypatch.setattr(boxing_prices, "overlap", lambda a, b: counted.append(1) or 1)
    many, grid = one_axis(*range(3072)), Placement.of("cpu", np.arange(3072).reshape(384, 8))
    found = find_boxing_path(Layout.of(many, "P"), Layout.of(grid, "B, S(0)"), (8192, 8192), 2, LINK)
    assert len(counted) < 10_000 and found.wire_bytes > 0


def test_axes_that_are_alike_are_merged():
    grid = Placement.of("cpu", [[0, 1], [2, 3]])
    cube = Placement.of("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])

    def shapes(source, target, shape=(8, 8), placement=grid):
        found = merge_axes(Layout.of(placement, source), Layout.of(placement, target), shape)
        return [layout.placement.shape for layout in found]

    assert shapes("S(0), S(0)", "B, B") == [(4,), (4,)]
    assert shapes("S(0), S(0)", "B, B", (6, 8)) == [(2, 2), (2, 2)]  # 2, 1, 2, 1 rows are not 2, 2, 1, 1
    assert shapes("S(0), S(0)", "B, S(1)") == [(2, 2), (2, 2)]
    assert shapes("P, P, S(0)", "B, B, S(1)", placement=cube) == [(4, 2), (4, 2)]
    single = Placement.of("cpu", [[2], [3]])
    assert [x.placement.shape for x in merge_axes(Layout.of(single, "S(0), P"), Layout.of(grid, "B, B"), (8, 8))] == [
        (2,),
        (4,),
    ]


def test_every_rank_finds_the_same_path():
    pairs = list(sampled_pairs(100, seed=5))
    first = [str(find_boxing_path(*pair[:3], 1, pair[3])) for pair in pairs]
    find_boxing_path.cache_clear()
    assert first == [str(find_boxing_path(*pair[:3], 1, pair[3])) for pair in reversed(pairs)][::-1]


def test_a_path_prints_its_steps():
    a, b = Layout.of(one_axis(0, 1), "P"), Layout.of(one_axis(2, 3), "B")
    text = str(find_boxing_path(a, b, (1024, 1024), 4, LINK))
    for part in ("in 2 steps", "1. boxing P on cpu:[0, 1]", "2. boxing S(0)", "adds to its shard", "together",
                 "temporary at most", "predicted", "directly"):  # fmt: skip
        assert part in text, text
