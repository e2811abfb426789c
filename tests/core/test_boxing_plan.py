"""Boxing plans executed in numpy against the oracle, for every pair of layouts on many placements."""

import itertools

import numpy as np
import pytest

from tests.oracle import assert_holds, shard
from workbench.core.boxing import LinkCost, plan_boxing
from workbench.core.boxing_path import find_boxing_path
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.errors import LayoutError

GRIDS = [[0], [2], [0, 1], [1, 0], [1, 2, 3], [3, 1, 2, 0], [[0, 1], [2, 3]], [[3, 0], [1, 2]], [[0, 1, 2], [3, 4, 5]]]
ENTRIES = ["S(0)", "S(1)", "B", "P"]
SHAPES = [(5, 7), (2, 3), (0, 4), (6, 6)]


def layouts(grid):
    placement = Placement.of("cpu", grid)
    return [Layout.of(placement, list(sbp)) for sbp in itertools.product(ENTRIES, repeat=placement.num_axes)]


def execute(plan, shards):
    result = {}
    for rank in plan.destination.placement:
        out = np.zeros(plan.destination.local_shape(plan.shape, rank))
        for move in plan.moves_to(rank):
            target = tuple(slice(*bounds) for bounds in move.destination_region)
            out[target] += shards[move.source][tuple(slice(*bounds) for bounds in move.source_region)]
        result[rank] = out
    return result


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source_grid", GRIDS, ids=str)
@pytest.mark.parametrize("target_grid", GRIDS, ids=str)
def test_every_pair_of_layouts_gives_the_right_shards(source_grid, target_grid):
    shapes = itertools.cycle(SHAPES)
    for source, target in itertools.product(layouts(source_grid), layouts(target_grid)):
        shape = next(shapes)
        full = np.arange(np.prod(shape), dtype=float).reshape(shape)
        plan = plan_boxing(source, target, shape, itemsize=8)
        assert_holds(execute(plan, shard(full, source)), target, full)
        if plan.is_local:
            assert all(move.source == move.destination for move in plan.moves), str(plan)
        sent = [move for rank in plan.source.placement for move in plan.moves_from(rank)]
        assert sorted(sent, key=repr) == sorted(plan.moves, key=repr), str(plan)
        assert plan.kind == "all-reduce" or plan.wire_bytes == sum(
            8 * move.num_elements for move in plan.moves if move.source != move.destination
        )


def test_the_oracle_notices_a_wrong_slice():
    layout = Layout.of(Placement.of("cpu", [0, 1]), "S(0)")
    full = np.arange(8.0).reshape(4, 2)
    swapped = dict(zip([1, 0], shard(full, layout).values(), strict=True))
    with pytest.raises(AssertionError):
        assert_holds(swapped, layout, full)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("pair", list(itertools.product(ENTRIES, repeat=2)), ids=lambda p: "->".join(p))
def test_bytes_of_the_classic_pairs(pair, num_ranks):
    placement = Placement.of("cpu", list(range(num_ranks)))
    source, target = (Layout.of(placement, entry) for entry in pair)
    plan = plan_boxing(source, target, (12, 24), itemsize=4)
    parts = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1 / num_ranks}.get(plan.kind, 0)
    assert plan.wire_bytes == parts * (num_ranks - 1) * 12 * 24 * 4


@pytest.mark.parametrize(
    ("source", "target", "per_tensor"),
    [
        ("S(0)", "S(0)", 1), ("S(0)", "S(1)", 1), ("B", "S(0)", 1), ("S(0)", "B", 3), ("B", "B", 3), ("S(0)", "P", 1),
        ("B", "P", 1), ("P", "S(0)", 2), ("P", "P", 2), ("P", "B", 6),
    ],
)  # fmt: skip
def test_bytes_between_placements(source, target, per_tensor):
    two, three = Placement.of("cpu", [0, 1]), Placement.of("cpu", [2, 3, 4])
    size = 12 * 12 * 4
    plan = plan_boxing(Layout.of(two, source), Layout.of(three, target), (12, 12), 4)
    assert plan.wire_bytes == per_tensor * size == sum(plan.bytes_received.values())


def test_a_sum_that_every_rank_needs_costs_less_by_way_of_slices():
    two, three = Placement.of("cpu", [0, 1]), Placement.of("cpu", [2, 3, 4])
    size = 1200 * 1200 * 4
    found = find_boxing_path(Layout.of(two, "P"), Layout.of(three, "B"), (1200, 1200), 4, LinkCost(1e-5, 1e9))
    assert found.wire_bytes == (2 + 3 - 1) * size


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(7, 3), (1,), (0, 2), (8, 5)])
def test_a_sum_in_one_step_and_in_two(num_ranks, shape):
    ranks = Placement.of("cpu", list(range(num_ranks)))
    plan, size = plan_boxing(Layout.of(ranks, "P"), Layout.of(ranks, "B"), shape, 4), 4 * int(np.prod(shape))
    assert plan.wire_bytes == 2 * (num_ranks - 1) * size
    at_once = plan.on(LinkCost(1e-5, 1e9, one_shot_bytes=size))
    assert at_once.wire_bytes == num_ranks * (num_ranks - 1) * size
    assert at_once.peak_temporary_bytes == num_ranks * size and plan.peak_temporary_bytes <= 2 * size + 4 * num_ranks
    assert "each by itself" in str(at_once) and ("a slice each" in str(plan)) == (num_ranks > 2)


def test_the_load_is_even_where_all_ranks_have_copies():
    grid = Placement.of("cpu", [[0, 1], [2, 3]])
    for sbp, target in (("B, P", "S(1), B"), ("P, B", "B, S(1)"), ("B, S(0)", "S(1), B")):
        sent = plan_boxing(Layout.of(grid, sbp), Layout.of(grid, target), (8, 8), 1).bytes_sent
        assert len(set(sent.values())) == 1, (sbp, target, sent)


def test_the_load_of_broadcast_sources_is_spread():
    source = Layout.of(Placement.of("cpu", [0, 1]), "B")
    target = Layout.of(Placement.of("cpu", [2, 3]), "B")
    assert set(plan_boxing(source, target, (4,), 4).bytes_sent.values()) == {16}


def test_a_plan_prints_who_sends_what_to_whom():
    placement = Placement.of("cpu", [0, 1])
    text = (
        plan_boxing(Layout.of(placement, "S(0)"), Layout.of(placement, "B"), (4, 8), 4)
        .on(LinkCost(1e-3, 1e9))
        .describe()
    )
    for part in ("all-gather", "0 -> 1", "64 B", "on the wire 128 B", "predicted 1.00 ms"):
        assert part in text


def test_mixed_reductions_are_refused():
    placement = Placement.of("cpu", [[0, 1], [2, 3]])
    with pytest.raises(LayoutError, match=r"mixes the reductions"):
        plan_boxing(Layout.of(placement, "P, P(max)"), Layout.of(placement, "B, B"), (4,), 4)


def test_plans_for_thousands_of_ranks_count_the_same_bytes():
    many, grid = Placement.of("cpu", list(range(3072))), Placement.of("cpu", np.arange(3072).reshape(384, 8))
    size = 8192 * 8192 * 2

    def wire(source, source_sbp, target, target_sbp):
        plan = plan_boxing(Layout.of(source, source_sbp), Layout.of(target, target_sbp), (8192, 8192), 2)
        assert "... and more" in str(plan) and plan.moves_to(17) and plan.moves_from(17)
        return plan.wire_bytes

    assert wire(many, "S(0)", many, "B") == 3071 * size == wire(many, "P", many, "S(1)")
    # Of a copy in each of 384 groups, every rank has the rows of its group already: an eighth of what it needs.
    assert wire(grid, ["B", "S(0)"], many, "S(1)") == pytest.approx(size * 7 / 8, rel=0.01)


def test_the_even_load_of_copies_is_the_counted_one_in_sum(monkeypatch):
    grid, other = Placement.of("cpu", [[0, 1], [2, 3], [4, 5]]), Placement.of("cpu", [5, 3, 7])
    layouts = [Layout.of(grid, "B, S(0)"), Layout.of(other, "S(1)")]
    counted = plan_boxing(*layouts, (8, 9), 4).wire_bytes
    monkeypatch.setattr("workbench.core.boxing._MAX_COUNTED_MOVES", 0)
    plan_boxing.cache_clear()
    even = plan_boxing(*layouts, (8, 9), 4)
    assert even.wire_bytes == counted > 0
