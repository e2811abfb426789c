"""Tensors in buffers that ranks of one host share: each writes its part, all read the full tensor in place."""

import gc

import pytest
import torch

from tests.transport.shared_ranks import assert_all_returned, run_shared
from workbench.core.layout import balanced_bounds
from workbench.errors import CollectiveAborted

NUM_RANKS = 3
GROUP = tuple(range(NUM_RANKS))


def whole_of(number, shape, dtype):
    """Values of the lease with this number, the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


def begin(transport, rank, number, shapes, dims=None, dtype=torch.float32):
    """This rank's parts of random full_shapes, cut along ``dims``: has_room, end, and the expected tensors."""
    full_shapes = [whole_of(number * 100 + i, shape, dtype) for i, shape in enumerate(shapes)]
    regions = []
    for shape, dim in zip(shapes, dims or [0] * len(shapes), strict=True):
        region = [(0, size) for size in shape]
        region[dim] = list(balanced_bounds(shape[dim], NUM_RANKS))[rank]
        regions.append(tuple(region))
    cuts = [tuple(slice(*bounds) for bounds in region) for region in regions]
    parts = [whole[cut].contiguous() for whole, cut in zip(full_shapes, cuts, strict=True)]
    has_room, end = transport.start_shared_all_gather(GROUP, shapes, regions, parts, number, f"lease {number}")
    return has_room, end, full_shapes


def assert_lease(transport, rank, number, shapes, **options):
    has_room, end, expected = begin(transport, rank, number, shapes, **options)
    assert has_room
    assert_same(end(), expected)


def assert_same(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_full_tensors_are_right_in_every_lease(dtype):
    """Of sizes n*k, n*k+1, n*k+2, fewer rows than ranks, other dims, growing and shrinking."""

    def program(transport, rank):
        for number in range(12):
            rows = 3 * (number % 5) + number % 3 + 1
            shapes, dims = [(rows, 7), (5, rows), (rows,), (4, 3, rows)], [0, 1, 0, 2]
            assert_lease(transport, rank, number, shapes, dims=dims, dtype=dtype)

    assert_all_returned(run_shared(program, NUM_RANKS))


def test_a_host_holds_one_copy():
    shape = (3 * 2**18,)  # 3 MiB

    def program(transport, rank):
        before = transport.idle_bytes
        for number in range(9):
            assert_lease(transport, rank, number, [shape])
        return transport.idle_bytes - before, transport.read_bytes

    found = assert_all_returned(run_shared(program, NUM_RANKS))
    assert (
        sum(more for more, _ in found) <= 3 * 3 * 2**20
    )  # three buffers; a copy on every rank would be as much each time
    assert [read for _, read in found] == [9 * 2 * 2**20] * NUM_RANKS


def test_held_tensors_are_not_overwritten():
    """All ranks find that no buffer is free, although only one of them holds a tensor."""

    def program(transport, rank):
        kept, free_buffers = None, []
        for number in range(8):
            has_room, end, expected = begin(transport, rank, number, [(64, 3), (9,)])
            found = end()
            free_buffers.append(has_room)
            assert_same(found, expected if has_room else [])
            if number == 1 and rank == 1:
                kept = found[1]
            del found
        if kept is not None:
            assert torch.equal(kept, whole_of(101, (9,), torch.float32))
            del kept
        for number in range(8, 12):
            has_room, end, expected = begin(transport, rank, number, [(64, 3), (9,)])
            free_buffers.append(has_room)
            assert_same(end(), expected if has_room else [])
        return free_buffers

    found = assert_all_returned(run_shared(program, NUM_RANKS))
    assert found[0] == found[1] == found[2]
    # Lease 4 follows lease 1 in its buffer. Lease 8 is the first to publish the release, lease 9 the first to use it.
    assert found[0] == [True] * 4 + [False] * 5 + [True] * 3


def test_a_lease_waits_for_the_previous_one():
    def program(transport, rank):
        for number in range(4):
            assert_lease(transport, rank, number, [(8,)])
        first, end_first, expected = begin(transport, rank, 4, [(8,)])
        second, end_second, _ = begin(transport, rank, 5, [(8,)])
        assert (first, second) == (True, False)
        assert_same(end_first(), expected)
        assert end_second() == []
        assert_lease(transport, rank, 6, [(8,)])

    assert_all_returned(run_shared(program, NUM_RANKS))


def test_an_abandoned_lease_holds_nothing():
    def program(transport, rank):
        for number in range(4):
            assert_lease(transport, rank, number, [(8,)])
        begin(transport, rank, 4, [(8,)])
        has_room, end, _ = begin(transport, rank, 5, [(8,)])
        assert not has_room
        end()
        for number in range(6, 12):
            assert_lease(transport, rank, number, [(8,)])

    assert_all_returned(run_shared(program, NUM_RANKS))


def test_diverged_ranks_get_both_calls():
    def program(transport, rank):
        begin(transport, rank, 0, [(8,)] if rank else [(640,)])[1]()

    found = run_shared(program, NUM_RANKS)
    assert all(isinstance(error, CollectiveAborted) for error in found)
    assert any("diverged" in str(error) for error in found)


def test_a_tensor_outlives_the_world():
    def program(transport, rank):
        has_room, end, expected = begin(transport, rank, 0, [(1000,)])
        assert has_room
        return end(), expected

    results = assert_all_returned(run_shared(program, NUM_RANKS))
    gc.collect()
    for found, expected in results:
        assert_same(found, expected)
