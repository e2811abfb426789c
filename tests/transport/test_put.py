"""Large rows are written by their owners straight into the new shards of their peers."""

import itertools

import pytest
import torch

from tests.transport.shared_ranks import assert_all_returned, run_in_worlds
from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors.global_tensor import local_torch, spec_of, wrap
from workbench.transport.messaging.transfer_plan import plan_transfer
from workbench.transport.shared import put
from workbench.transport.shared.segment import Segment

RANKS = [0, 1, 2]
LARGE, NARROW, SMALL = (999, 601), (100_000, 5), (30, 60)
"""Shapes; slices of the narrow one have rows of a few bytes."""


def plan_of(source, target, shape, ranks=RANKS):
    return plan_boxing(
        Layout.of(Placement.of("cpu", RANKS), source), Layout.of(Placement.of("cpu", ranks), target), shape, 4
    )


@pytest.mark.parametrize(
    ("source", "target", "shape", "ranks", "puts"),
    [
        ("S(0)", "S(1)", LARGE, RANKS, True),
        ("S(0)", "B", LARGE, RANKS, True),
        ("S(0)", "S(0)", LARGE, [2, 0, 1], True),
        ("S(0)", "S(1)", SMALL, RANKS, False),
        ("S(1)", "B", LARGE, RANKS, False),
        ("P", "S(0)", LARGE, RANKS, False),
        ("S(0)", "S(1)", LARGE, [0, 1], False),
    ],
)
def test_all_ranks_decide_the_same_about_put(source, target, shape, ranks, puts):
    plan = plan_of(source, target, shape, ranks)
    plans = {rank: plan_transfer(plan, rank, torch.float32) for rank in RANKS}
    assert {transfer.puts for transfer in plans.values()} == {puts}
    for (rank, transfer), (other, theirs) in itertools.permutations(plans.items(), 2):
        assert (other in [target.rank for target in transfer.put_targets]) is (puts and rank in theirs.writers)


def assert_right(world, shape, dtype, target, make_local, ranks=RANKS):
    """Box rows to ``target``, overwrite the source at once, and compare with one device."""
    whole = torch.arange(shape[0] * shape[1]).remainder(251).to(dtype).view(shape)
    before, after = Layout.of(Placement.of("cpu", RANKS), "S(0)"), Layout.of(Placement.of("cpu", ranks), target)
    place = tuple(slice(*bounds) for bounds in before.region(shape, world.rank))
    local = make_local(whole[place])
    x = wrap(local.detach(), spec_of(world, before, shape))
    read_before = world.transport.read_bytes
    y = x.to_global(placement=after.placement, sbp=target)
    received = plan_of("S(0)", target, shape, ranks).bytes_received[world.rank] * dtype.itemsize // 4
    assert world.transport.read_bytes - read_before == received
    with local_torch():
        local.zero_()
        found = y.as_subclass(torch.Tensor)
        expected = whole[tuple(slice(*bounds) for bounds in after.region(shape, world.rank))]
        assert found.equal(expected), (shape, dtype, target)
        found.zero_()  # the result is this rank's own


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [LARGE, NARROW], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("block_bytes", [put.BLOCK_BYTES, 10_000], ids=str)
def test_rows_arrive_from_any_memory(monkeypatch, shape, dtype, block_bytes):
    monkeypatch.setattr(put, "BLOCK_BYTES", block_bytes)

    def program(world):
        ways = [
            torch.clone,
            lambda local: world.transport._segment.empty(local.shape, local.dtype).copy_(local),
            lambda local: local.t().contiguous().t(),
            lambda local: torch.stack([local, local], -1)[..., 0],
            lambda local: local.conj().resolve_conj().conj() if dtype.is_complex else local.clone(),
        ]
        for make_local, target in itertools.product(ways, ("S(1)", "B")):
            for _ in range(2):  # the second time, in the same places
                assert_right(world, shape, dtype, target, make_local)
        assert_right(world, shape, dtype, "S(0)", torch.clone, [2, 0, 1])
        return True

    assert assert_all_returned(run_in_worlds(program, len(RANKS))) == [True] * len(RANKS)


def test_a_prepared_put_follows_shards_that_move():
    def program(world):
        kept = []
        for turn in range(12):
            rows = Layout.of(Placement.of("cpu", RANKS), "S(0)")
            place = tuple(slice(*bounds) for bounds in rows.region(LARGE, world.rank))
            whole = torch.arange(LARGE[0] * LARGE[1]).add(turn).remainder(253).float().view(LARGE)
            if turn != 7:  # in the same place as before, with other numbers
                local = torch.empty(rows.local_shape(LARGE, world.rank))
                kept.append(local)
            local.copy_(whole[place])
            x = wrap(local.detach(), spec_of(world, rows, LARGE))
            y = x.to_global(sbp="S(1)")
            if turn % 3 == world.rank:  # one rank keeps its new shard, so that the next one lies elsewhere
                kept.append(y)
            columns = Layout.of(Placement.of("cpu", RANKS), "S(1)")
            with local_torch():
                expected = whole[tuple(slice(*bounds) for bounds in columns.region(LARGE, world.rank))]
                assert y.as_subclass(torch.Tensor).equal(expected), turn
            del y
        for _ in range(2):  # nobody moves now: messages are compared and views are there
            x.to_global(sbp="S(1)")
        (prepared,) = world.transport._puts._prepared.values()
        before = prepared._views
        x.to_global(sbp="S(1)")
        num_blocks = -(-prepared.plan.shard_bytes // put.BLOCK_BYTES)
        return prepared._views is before and len(before) == num_blocks * len(RANKS) > len(RANKS)

    assert assert_all_returned(run_in_worlds(program, len(RANKS))) == [True] * len(RANKS)


def test_a_new_shard_in_ordinary_memory_is_filled_through_a_block(monkeypatch):
    monkeypatch.setattr(Segment, "allocate_for_tensor", lambda *args: None)

    def program(world):
        assert_right(world, LARGE, torch.float32, "S(1)", torch.clone)
        return world.transport._segment.allocators[0].is_empty

    assert assert_all_returned(run_in_worlds(program, len(RANKS))) == [True] * len(RANKS)


def test_ranks_that_put_for_different_boxings_get_both_names():
    def program(world):
        rows = Layout.of(Placement.of("cpu", RANKS), "S(0)")
        x = wrap(torch.ones(rows.local_shape(LARGE, world.rank)), spec_of(world, rows, LARGE))
        x.to_global(sbp="B" if world.rank == 0 else "S(1)")

    texts = " ".join(map(str, run_in_worlds(program, len(RANKS))))
    assert "ranks diverged" in texts and "-> S(1)" in texts and "-> B" in texts
