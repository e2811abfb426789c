"""Boxings over shared memory: shards read in place, copied or in persistent buffers give one device's numbers."""

import copy
import gc
import io
import itertools
import os
import random
import threading

import pytest
import torch

import workbench as wb
import workbench.tensors.install  # installs the patches of torch
from tests.processes import run_processes
from tests.timeouts import WAIT_TIMEOUT_S
from tests.transport.shared_ranks import assert_all_returned, run_in_worlds, run_shared
from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.errors import CollectiveAborted
from workbench.tensors.global_tensor import local_torch, spec_of, wrap
from workbench.tensors.world import current
from workbench.transport.messaging import shared_memory
from workbench.transport.messaging.link import InPlaceBuffer
from workbench.transport.messaging.transfer_plan import plan_transfer
from workbench.transport.shared import persistent, segment

LAYOUTS = ["S(0)", "S(1)", "B", "P", "P(max)"]


def logical(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, shape, generator=generator)
    return values.to(dtype) if dtype != torch.bool else values > 0


def shard(whole, layout, rank):
    """The shard of ``rank``: terms of a sum are ``whole`` and zeros, those of a maximum ``whole`` and small numbers."""
    place = tuple(slice(*bounds) for bounds in layout.region(tuple(whole.shape), rank))
    local = whole[place]
    entry = layout.sbp[0]
    if repr(entry) == "P" and rank != layout.placement.grid[-1]:
        return torch.zeros_like(local)
    if repr(entry) == "P(max)" and rank == layout.placement.grid[-1]:
        return torch.full_like(local, -9) if local.dtype != torch.bool else torch.zeros_like(local)
    return local


def lying(world, local, where):
    """The same values in the segment, outside of it, with other strides, or as part of a larger tensor."""
    if where == "segment":
        return world.transport._segment.empty(local.shape, local.dtype).copy_(local)
    if where == "part":  # rows in the middle of a tensor in the segment
        whole = world.transport._segment.empty((local.shape[0] + 2, *local.shape[1:]), local.dtype)
        whole[1:-1] = local
        return whole[1:-1]
    if where == "transposed":
        return local.t().contiguous().t()
    return local.clone()


def _label(world, local, layout, shape):
    return wrap(local, spec_of(world, layout, tuple(shape)))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_wherever_a_shard_lies_the_result_is_that_of_one_device(num_ranks):
    shapes = [(5, 3), (64, 48), (300, 257), (2, 40000)]
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int16]
    cases = [
        (source, target, shape, dtype, where)
        for (source, target), shape in itertools.product(itertools.permutations(LAYOUTS, 2), shapes)
        for dtype, where in [(random.Random(repr((source, target, shape))).choice(dtypes), w) for w in
                             ("segment", "outside", "part", "transposed")]
        if not (target.startswith("P(") or {source, target} == {"P", "P(max)"})
    ]  # fmt: skip

    def program(world):
        placement = Placement.of("cpu", list(range(num_ranks)))
        in_place = 0
        for source, target, shape, dtype, where in cases:
            whole = logical(shape, dtype)
            before, after = Layout.of(placement, source), Layout.of(placement, target)
            local = lying(world, shard(whole, before, world.rank), where)
            in_place += world.transport._segment.locate(local, local.nbytes) is not None
            x = _label(world, local, before, shape)
            for _ in range(3):  # fixed buffers take turns
                y = x.to_global(sbp=target)
                with local_torch():
                    found = y.as_subclass(torch.Tensor).clone()
                if target == "P":
                    found = _label(world, found, after, shape).full_tensor()
                    expected = whole
                else:
                    expected = whole[tuple(slice(*bounds) for bounds in after.region(shape, world.rank))]
                assert torch.equal(found, expected), (source, target, shape, dtype, where, world.rank)
        return in_place

    assert all(in_place > 20 for in_place in assert_all_returned(run_in_worlds(program, num_ranks)))


def overwriting(num_rounds, sizes):
    """Every rank writes to its shard right after each boxing; its peers must have read the old values."""
    world = current()
    placement, rank, size = Placement.of("cpu", list(range(world.world_size))), world.rank, world.world_size
    chance = random.Random(5)  # the same on all ranks
    pairs = [("S(0)", "B"), ("S(0)", "S(1)"), ("P", "S(0)"), ("P", "B"), ("S(1)", "B")]
    num_in_place = 0
    for round_ in range(num_rounds):
        source, target = chance.choice(pairs)
        rows = chance.choice(sizes)
        shape = (rows, 64)
        before, after = Layout.of(placement, source), Layout.of(placement, target)
        local_shape = before.local_shape(shape, rank)
        in_segment = chance.random() < 0.7
        local = world.transport._segment.empty(local_shape, torch.float32) if in_segment else torch.empty(local_shape)
        num_in_place += in_segment and local.nbytes >= segment.MIN_IN_PLACE_BYTES
        x = _label(world, local, before, shape)
        for step in range(3):
            with local_torch():
                local.fill_(float(1000 * round_ + 10 * step + rank))
            y = x.to_global(sbp=target)
            with local_torch():
                local.fill_(-1.0)
                found = y.as_subclass(torch.Tensor)
                whole = torch.zeros(shape)
                for r in range(size):
                    whole[tuple(slice(*bounds) for bounds in before.region(shape, r))] += 1000 * round_ + 10 * step + r
                expected = whole[tuple(slice(*bounds) for bounds in after.region(shape, rank))]
                assert torch.equal(found, expected), (round_, step, source, target, shape)
                found.add_(1)  # the result is this rank's own
    world.transport.all_gather(torch.zeros(1), "the end")
    return num_in_place, sum(chunk.size for chunk in world.transport._segment.chunks)


@pytest.mark.procs
@pytest.mark.parametrize(("num_ranks", "rounds"), [(2, 80), pytest.param(4, 30, marks=pytest.mark.slow)])
def test_a_write_right_after_a_boxing_never_reaches_a_peer(num_ranks, rounds):
    results = run_processes(overwriting, num_ranks, rounds, [8, 40, 1000, 3000, 6000])
    assert all(num_in_place > rounds // 5 and size < 48 * 2**20 for num_in_place, size in results)


@pytest.mark.procs
@pytest.mark.slow
def test_many_writes_right_after_boxings_never_reach_a_peer():
    results = run_processes(overwriting, 4, 250, [8, 40, 200, 1000, 5000, 20000])
    assert all(num_in_place > 0 for num_in_place, _ in results)


def test_a_block_is_free_after_the_last_view_of_its_tensor():
    def program(transport, rank):
        allocator = transport._segment.allocators[0]
        one = transport._segment.empty((200, 100), torch.float32)
        address, view = one.data_ptr(), one[150:].view(-1)
        del one
        assert transport._segment.empty((200, 100), torch.float32).data_ptr() != address and view.shape == (5000,)
        del view
        again = transport._segment.empty((200, 100), torch.float32)
        assert again.data_ptr() == address and not again._is_view()
        weight = again.requires_grad_()
        loss = (weight * weight).sum()  # autograd holds it
        del again, weight
        assert transport._segment.empty((200, 100), torch.float32).data_ptr() != address
        del loss
        gc.collect()
        held = [transport._segment.empty((3000, 1000), torch.float32) for _ in range(4)]
        assert len(transport._segment.chunks) > 1
        dropping = threading.Thread(target=held.clear)
        dropping.start()
        dropping.join(5)
        transport._segment.empty((10000,), torch.float32)
        transport._segment._find_room(1).release()
        return allocator.is_empty and all(a.is_empty for a in transport._segment.allocators)

    assert assert_all_returned(run_shared(program)) == [True, True]


def test_tensors_outlive_their_world_and_can_be_copied_and_saved():
    def program(transport, rank):
        tensor = transport._segment.empty((200, 100), torch.float32).fill_(rank)
        transport.close()
        tensor += 1
        saved = io.BytesIO()
        torch.save(tensor, saved)
        saved.seek(0)
        copy.deepcopy(tensor).resize_(1000, 1000)  # the copy is an ordinary tensor
        return torch.equal(torch.load(saved), tensor), float(tensor.mean()), len(saved.getvalue()) < 82000

    assert assert_all_returned(run_shared(program)) == [(True, 1.0, True), (True, 2.0, True)]


def test_too_little_memory_makes_ordinary_tensors(monkeypatch):
    monkeypatch.setattr(segment, "available_bytes", lambda: 2**20)

    def program(world):
        placement = Placement.of("cpu", [0, 1])
        shape = (4000, 1000)
        local = torch.full((2000, 1000), 1.0 + world.rank)
        x = _label(world, local, Layout.of(placement, "S(0)"), shape)
        held = [x.to_global(sbp="B") for _ in range(2)]
        with local_torch():
            sums = [(float(y[:2000].mean()), float(y[2000:].mean())) for y in held]
        return sums, len(world.transport._segment.chunks)

    for sums, num_chunks in assert_all_returned(run_in_worlds(program)):
        assert sums == [(1.0, 2.0)] * 2
        assert num_chunks <= 2  # for the shard that is copied; none is made for results


def test_memory_does_not_grow_and_is_reused():
    def program(world):
        placement = Placement.of("cpu", [0, 1])
        sizes = []
        x = _label(world, torch.ones(400, 1000), Layout.of(placement, "S(0)"), (800, 1000))
        for _ in range(60):
            y = x.to_global(sbp="B")
            z = y.to_global(sbp="S(1)").to_global(sbp="S(0)")
            world.transport.all_reduce(torch.ones(700000), [0, 1], "sum", 7, "sum")
            sizes.append(sum(chunk.size for chunk in world.transport._segment.chunks))
            x = z
        return sizes

    for sizes in assert_all_returned(run_in_worlds(program)):
        assert sizes[5] == sizes[-1] <= 40 * 2**20


def test_memory_of_a_large_tensor_is_returned_to_the_system(monkeypatch):
    def program(transport, rank):
        def num_bytes():
            return sum(os.fstat(chunk.file).st_blocks * 512 for chunk in transport._segment.chunks)

        def use(number):
            for _ in range(number):
                transport._segment.empty((20000,), torch.float32)

        use(1)
        small, large = num_bytes(), transport._segment.empty((30_000_000,), torch.float32).fill_(1)
        use(3 * segment._IDLE_ALLOCATIONS)
        held = num_bytes()
        del large
        use(3 * segment._IDLE_ALLOCATIONS)
        after = num_bytes()
        again = transport._segment.empty((30_000_000,), torch.float32).fill_(2)
        total, chunks = float(again.sum()), len(transport._segment.chunks)
        del again
        use(3 * segment._IDLE_ALLOCATIONS)
        monkeypatch.setattr(shared_memory, "available_bytes", lambda: 2**20)
        ordinary = transport._segment.empty((30_000_000,), torch.float32)
        where = transport._segment.locate(ordinary, ordinary.nbytes)
        return small == after, held - small, total, chunks, where

    for result in assert_all_returned(run_shared(program)):
        assert result == (True, 120 * 10**6 // 2**20 * 2**20 + 2**20, 6e7, 2, None)


def test_persistent_buffers_make_room_for_new_plans():
    def program(world):
        placement = Placement.of("cpu", [0, 1])
        for round_ in range(2):
            for rows in range(100, 200):
                shape = (2 * rows, 64)
                x = _label(world, torch.full((rows, 64), 1.0 + world.rank), Layout.of(placement, "S(0)"), shape)
                for _ in range(2):
                    y = x.to_global(sbp="B")
                with local_torch():
                    assert (float(y[:rows].mean()), float(y[rows:].mean())) == (1.0, 2.0), (round_, rows)
        return len(world.transport._persistent._found)

    for num_exchanges in assert_all_returned(run_in_worlds(program)):
        assert 1 < num_exchanges <= persistent.PERSISTENT_BYTES // (2 * 100 * 64 * 4)


def test_dropped_persistent_buffers_are_read_right_and_freed():
    """Messages are compared with those of two runs before: another place, or a request for an ack, is detected."""

    def program(world):
        exchanges, links = world.transport._persistent, world.transport._links.values()
        for round_ in range(20):
            if world.rank == 1 and round_ == 6:
                exchanges.of = lambda plan: None
            if world.rank == 1 and round_ == 14:
                del exchanges.of
            local = torch.full((100, 64), 2.0 * round_ + world.rank)
            y = _label(world, local, Layout.of(Placement.of("cpu", [0, 1]), "S(0)"), (200, 64)).to_global(sbp="B")
            with local_torch():
                assert (float(y[:100].mean()), float(y[100:].mean())) == (2.0 * round_, 2.0 * round_ + 1)
        for link in links:
            link.collect_acks()
        return [link.has_unread for link in links]

    assert assert_all_returned(run_in_worlds(program)) == [[False], [False]]


def test_an_abort_ends_the_wait_for_readers():
    has_ended = threading.Event()

    def program(transport, rank):
        local = transport._segment.empty((100, 1000), torch.float32)
        if rank == 0:
            buffer = InPlaceBuffer(*transport._segment.locate(local, local.nbytes))
            transport._links[1].send(0, buffer, local.nbytes, b"a boxing")
            threading.Timer(0.1, transport.abort, ["the user has had enough"]).start()
            with pytest.raises(CollectiveAborted, match=r"waiting for rank 1 in a boxing.*: the user has had enough"):
                transport._endpoint.wait_for_acks(buffer, [1], b"a boxing")
            has_ended.set()
        else:
            assert has_ended.wait(WAIT_TIMEOUT_S)  # it has read nothing, and is still there

    assert_all_returned(run_shared(program))


def test_a_deadlock_over_messages_and_acks_is_found():
    def program(transport, rank):
        out = torch.empty(3)
        if rank == 0:
            local = transport._segment.empty((100, 1000), torch.float32)
            buffer = InPlaceBuffer(*transport._segment.locate(local, local.nbytes))
            transport._links[1].send(0, buffer, local.nbytes, b"all-gather")
            transport._endpoint.wait_for_acks(buffer, [1], b"all-gather")
        elif rank == 1:
            transport.exchange([], [(2, out)], 3, "all-gather")
        else:
            transport.exchange([], [(0, out)], 4, "something else")

    results = run_shared(program, 3)
    assert all(isinstance(result, CollectiveAborted) for result in results)
    text = " ".join(map(str, results))
    assert "ranks diverged, each waits for the next" in text and "something else" in text


def test_ranks_in_different_boxings_get_both_names():
    def program(world):
        placement = Placement.of("cpu", [0, 1])
        x = _label(world, torch.ones(4, 8), Layout.of(placement, "S(0)"), (8, 8))
        x.to_global(sbp="B")
        x.to_global(sbp="B" if world.rank == 0 else "S(1)")

    texts = " ".join(map(str, run_in_worlds(program)))
    assert "ranks diverged" in texts and "S(0) on cpu:[0, 1] -> S(1)" in texts and "-> B" in texts


def test_each_way_to_write_a_layout_is_known():
    def program(world):
        placement = Placement.of("cpu", [0, 1])
        x = _label(world, torch.ones(4, 8), Layout.of(placement, "S(0)"), (8, 8))
        assert x.to_global(sbp=[wb.sbp.broadcast]).sbp == x.to_global(sbp="B").sbp == (wb.sbp.broadcast,)
        assert x.to_global(sbp="S(1)").sbp == x.to_global(sbp=wb.sbp.split(-1)).sbp == (wb.sbp.split(1),)
        assert x.to_global(placement=Placement.of("cpu", [1, 0])).placement.grid == (1, 0)

    assert_all_returned(run_in_worlds(program))


@pytest.mark.parametrize(
    ("source", "target", "interleaves"),
    [("S(1)", "B", True), ("S(0)", "B", False), ("S(0)", "S(1)", False), ("S(1)", "S(0)", True), ("P", "B", False)],
)
def test_columns_of_whole_shards_are_concatenated_row_by_row(source, target, interleaves):
    placement = Placement.of("cpu", [0, 1, 2])
    plan = plan_boxing(Layout.of(placement, source), Layout.of(placement, target), (30, 60), 4)
    assert plan_transfer(plan, 1, torch.float32).interleaves is interleaves
