"""The shared-memory transport: contents and order of messages, and the memory they need."""

import os
import random
import subprocess
import threading
import time

import pytest
import torch

from tests.transport.shared_ranks import assert_all_returned, run_shared
from workbench.transport import selection, system_calls
from workbench.transport.messaging import control_page
from workbench.transport.messaging.block_allocator import BlockAllocator
from workbench.transport.peer_processes import PeerProcesses
from workbench.transport.shared import all_reduce
from workbench.transport.shared import transport as shared

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64]


def values(rank, numel, dtype):
    """The values of rank ``rank``, the same on every call."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.randint(2, (numel,), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 20, (numel,), generator=generator).to(dtype)


def reduced(group, numel, dtype, reduction):
    """The terms, reduced in the order of the group; sums of 16-bit floats in 32 bits."""
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[reduction]
    terms = [values(rank, numel, dtype) for rank in group]
    if reduction == "sum" and dtype in (torch.bfloat16, torch.float16):
        terms = [term.float() for term in terms]
    total = terms[0]
    for term in terms[1:]:
        total = combine(total, term)
    return total.to(dtype)


@pytest.mark.parametrize("way", ["one step", "two steps", "pieces"])
def test_every_rank_gets_the_bits_of_the_ordered_sum(way, monkeypatch):
    monkeypatch.setattr(all_reduce, "ONE_SHOT_BYTES", -1 if way == "two steps" else 1 << 30)
    monkeypatch.setattr(all_reduce, "PIECE_BYTES", 48000 if way == "pieces" else 1 << 30)
    cases = [
        (group, numel, dtype, reduction)
        for group in ([0, 1, 2], [2, 0, 1], [1, 2])
        for numel in (0, 1, 7, 70001)
        for dtype in FLOATS + OTHERS
        for reduction in ("sum", "max", "min")
        if not (dtype.is_complex and reduction != "sum")
    ]
    random.Random(0).shuffle(cases)
    cases = cases[:60]

    def program(transport, rank):
        found = []
        for tag, (group, numel, dtype, reduction) in enumerate(cases):
            own = values(rank, numel, dtype)
            member = rank in group
            found.append(transport.all_reduce(own, group, reduction, tag, f"case {tag}") if member else None)
            assert torch.equal(own, values(rank, numel, dtype))
        return found

    results = assert_all_returned(run_shared(program, 3))
    for index, (group, numel, dtype, reduction) in enumerate(cases):
        expected = reduced(group, numel, dtype, reduction)
        for rank in group:
            assert torch.equal(results[rank][index], expected), cases[index]


def test_the_order_of_a_sum_matters():
    """Otherwise the test above would prove nothing."""
    assert not torch.equal(
        reduced([0, 1, 2], 1000, torch.float32, "sum"), reduced([2, 0, 1], 1000, torch.float32, "sum")
    )


def test_a_reduction_starts_without_waiting_and_packs_tensors_of_any_shape():
    first_has_started = threading.Event()
    numel = all_reduce.PIECE_BYTES // 8

    def program(transport, rank):
        if rank == 1:
            assert first_has_started.wait(5)  # rank 0 has got here although rank 1 has done nothing yet
        big = torch.arange(3.0 * numel).view(3, -1).t()
        terms = [torch.full((3,), rank + 1.0), torch.full((2, 2), 10.0 * (rank + 1)), big * (rank + 1)]
        finish = transport.start_all_reduce(terms, [0, 1], "sum", 4, "sum")
        first_has_started.set()
        total = finish()
        return (
            total[:7].tolist(),
            torch.equal(total[7:].view_as(big), big * 3),
            sum(c.size for c in transport._segment.chunks),
        )

    for result in assert_all_returned(run_shared(program)):
        assert result == ([3.0] * 3 + [30.0] * 4, True, 2 * shared.FIRST_CHUNK_BYTES)  # two pieces, the result


def test_sums_over_several_groups_may_use_one_number_at_once():
    numel = 3 * all_reduce.PIECE_BYTES // 4

    def program(transport, rank):
        groups = [[0, 1], [2, 0, 1], [1, 2], [0, 2]]
        mine = [group for group in groups if rank in group]
        terms = [torch.full((numel,), rank + 1.0)]
        finishes = [transport.start_all_reduce(terms, group, "sum", 7, "sum") for group in mine]
        return [float(finish().unique().item()) for finish in finishes]

    assert assert_all_returned(run_shared(program, 3)) == [[3.0, 6.0, 4.0], [3.0, 6.0, 5.0], [6.0, 5.0, 4.0]]


def test_exchanges_of_every_dtype_and_empty_tensors():
    def program(transport, rank):
        for tag, dtype in enumerate(FLOATS + OTHERS):
            for numel in (0, 1, 33):
                out = torch.empty(numel, dtype=dtype)
                transport.exchange([(1 - rank, values(rank, numel, dtype))], [(1 - rank, out)], tag, "exchange")
                assert torch.equal(out, values(1 - rank, numel, dtype))
        return [part.tolist() for part in transport.all_gather(torch.tensor([rank, 7]), "gather")]

    assert assert_all_returned(run_shared(program)) == [[[0, 7], [1, 7]]] * 2


def test_a_tensor_and_its_conjugate_are_two_messages():
    whole = torch.randn(5, dtype=torch.complex64)
    sent = [whole, whole.conj(), whole.imag, whole.conj().imag]

    def program(transport, rank):
        if rank == 0:
            transport.exchange([(1, tensor) for tensor in sent], [], 0, "message")
            return None
        found = [torch.empty(5, dtype=tensor.dtype) for tensor in sent]
        transport.exchange([], [(0, out) for out in found], 0, "message")
        return [torch.equal(out, tensor) for out, tensor in zip(found, sent, strict=True)]

    assert assert_all_returned(run_shared(program))[1] == [True] * 4


def test_strided_slices_are_sent():
    def program(transport, rank):
        matrix = torch.arange(12.0).view(3, 4) + 100 * rank
        sends, wanted = [(1 - rank, matrix[:, 1:3])], [(1 - rank, (3, 2))]
        pieces, release = transport.start_exchange_in_place(sends, wanted, matrix.dtype, 0, "x")()
        found = pieces[0].clone()
        release()
        return torch.equal(found, (torch.arange(12.0).view(3, 4) + 100 * (1 - rank))[:, 1:3])

    assert assert_all_returned(run_shared(program)) == [True, True]


def test_sending_never_blocks_and_messages_match_by_tag_then_by_order():
    count = 2 * control_page.NUM_SLOTS + 5
    all_sent = threading.Event()

    def program(transport, rank):
        if rank == 0:
            for tag in range(count):
                for step in (0.0, 0.5):
                    transport.exchange([(1, torch.full((3,), tag + step))], [], tag, "message")
            all_sent.set()
            transport.flush()
            return []
        assert all_sent.wait(10)
        received = []
        for tag in reversed(range(count)):
            for _ in range(2):
                out = torch.empty(3)
                transport.exchange([], [(0, out)], tag, "message")
                received.append(float(out[0]))
        return received

    _, received = assert_all_returned(run_shared(program))
    assert received == [tag + step for tag in reversed(range(count)) for step in (0.0, 0.5)]


def test_memory_grows_with_the_largest_messages_only_and_is_free_again():
    large = shared.FIRST_CHUNK_BYTES // 4 + 1000

    def program(transport, rank):
        sizes = []
        for round_ in range(200):
            numel = large if round_ == 20 else 1000 * (round_ % 7)
            out = torch.empty(numel)
            transport.exchange([(1 - rank, torch.full((numel,), 1.0 + rank))], [(1 - rank, out)], 2, "round")
            transport.all_reduce(out, [0, 1], "sum", 3, "sum")
            sizes.append([chunk.size for chunk in transport._segment.chunks])
        transport.all_gather(torch.zeros(1), "the end")
        for peer in transport._links.values():
            deadline = time.monotonic() + 5
            while (
                not all(allocator.is_empty for allocator in transport._segment.allocators)
                and time.monotonic() < deadline
            ):
                peer.collect_acks()
        return sizes, [allocator.is_empty for allocator in transport._segment.allocators]

    for sizes, empty in assert_all_returned(run_shared(program)):
        assert len(sizes[19]) == 1 and sizes[19][0] == shared.FIRST_CHUNK_BYTES
        assert len(sizes[20]) > 1 and sizes[-1] == sizes[20]
        assert all(empty)


def test_a_tensor_in_the_segment_owns_its_block_until_its_last_view_dies():
    def program(transport, rank):
        shape, segment = (300, 1000), transport._segment
        for dtype in FLOATS + OTHERS:
            tensor = transport._segment.empty(shape, dtype)
            assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
            assert not tensor._is_view()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            tensor.copy_(values(rank, tensor.numel(), dtype).view(shape))
            assert segment.locate(tensor, tensor.nbytes) is not None
            row = tensor[7]
            del tensor
            other = transport._segment.empty(shape, dtype).zero_()  # lies elsewhere
            assert row.equal(values(rank, 300_000, dtype).view(shape)[7])
            del row, other
        return segment.idle_bytes, [chunk.size for chunk in segment.chunks]

    for idle_bytes, sizes in assert_all_returned(run_shared(program)):
        assert sizes == [shared.FIRST_CHUNK_BYTES] and idle_bytes == shared.FIRST_CHUNK_BYTES


def test_a_tensor_for_several_ranks_is_copied_once():
    def program(transport, rank):
        if rank == 0:
            tensor = torch.ones(1000)
            transport.exchange([(1, tensor), (2, tensor), (2, tensor[:10])], [], 0, "broadcast")
            allocator = transport._segment.allocators[0]
            in_use = allocator.size - sum(end - start for start, end in allocator._free)
            transport.all_gather(torch.zeros(1), "go on")
            return in_use
        transport.all_gather(torch.zeros(1), "go on")
        for numel in [1000, 10][:rank]:
            out = torch.zeros(numel)
            transport.exchange([], [(0, out)], 0, "broadcast")
            assert out.sum() == numel
        return 0

    assert assert_all_returned(run_shared(program, 3))[0] == 4032 + 64


def test_blocks_never_overlap_and_merge_when_they_are_free():
    chance, allocator, held = random.Random(1), BlockAllocator(1 << 16), []
    for _ in range(3000):
        if held and chance.random() < 0.5:
            allocator.free(*held.pop(chance.randrange(len(held))))
        else:
            size = chance.randrange(1, 6000)
            start = allocator.allocate(size)
            if start is not None:
                assert start % 64 == 0 and start + size <= allocator.size
                assert all(start + size <= s or s + n <= start for s, n in held)
                held.append((start, size))
    for block in held:
        allocator.free(*block)
    assert allocator.is_empty and allocator.allocate(1 << 16) == 0


def test_long_headers_are_cut_and_still_differ():
    one, other = (control_page.encode_header("boxing of é" * 200 + end) for end in "ab")
    assert len(one) == len(other) <= 512 and one != other


def test_a_python_that_was_built_for_older_systems_shares_memory_too(monkeypatch):
    for name in ("memfd_create", "pidfd_open"):  # as in conda's
        monkeypatch.delattr(os, name)
    monkeypatch.delenv(selection.VARIABLE, raising=False)
    assert selection.why_not_shared() == ""
    peer = subprocess.Popen(["sleep", "60"])
    processes = PeerProcesses({1: peer.pid})
    assert not processes.has_ended(1)
    peer.kill()
    assert processes.has_ended(1, within_s=10.0)
    processes.close()
    peer.wait()


def test_a_system_without_files_of_processes_says_so(monkeypatch):
    monkeypatch.setattr(system_calls, "_PIDFD_OPEN", -1)
    system_calls.has_process_files.cache_clear()
    try:
        assert "or process files (Linux 5.3)" in selection.why_not_shared()
        assert not PeerProcesses({1: os.getpid()}).has_ended(1)
    finally:
        system_calls.has_process_files.cache_clear()
