"""The transport over NCCL, with its rules played."""

import threading
import warnings

import pytest
import torch

from tests.checked_device import DEVICE
from tests.transport import played_nccl
from tests.transport.nccl_ranks import run_played
from tests.transport.played_nccl import PlayedNccl
from tests.transport.shared_ranks import assert_all_returned
from workbench.transport.network import distributed
from workbench.transport.network.gloo import GlooTransport
from workbench.transport.network.nccl_watchdog import NcclWatchdog


def test_sends_are_not_waited_for_and_all_ranks_call_in_one_order(monkeypatch):
    waited, calls = [], []
    wait, start = played_nccl.Call.wait, PlayedNccl.call
    monkeypatch.setattr(played_nccl.Call, "wait", lambda self: (waited.append(self), wait(self)))
    monkeypatch.setattr(PlayedNccl, "call", lambda self, *args: calls.append(start(self, *args)) or calls[-1])
    one_way = {0: ([2, 1], []), 1: ([2], [0]), 2: ([], [1, 0])}

    def program(transport, rank):
        for peers, sources in (one_way[rank], ({0, 1, 2} - {rank},) * 2):
            transport.exchange([(p, torch.ones(2)) for p in peers], [(p, torch.empty(2)) for p in sources], 0, "boxing")
        transport.all_gather(torch.zeros(1), "barrier")

    results, nccl = run_played(program, 3)
    assert_all_returned(results)
    assert nccl.open_calls() == []
    calls = [call for call in calls if call.parts[0].kind != "all-gather"]
    assert [call for call in calls if call not in waited] == [c for c in calls if [p.kind for p in c.parts] == ["send"]]
    for rank, order in enumerate([[(0, 1), (0, 2)], [(0, 1), (1, 2)], [(0, 2), (1, 2)]]):
        *single, batch = [call for call in calls if call.rank == rank]
        assert [call.communicator[-2:] for call in single] == order
        assert batch.communicator is None and len(batch.parts) == 4


def test_torchs_warning_of_a_communicator_for_a_pair_is_not_shown():
    text = "An unbatched P2P op (send/recv) was called on this ProcessGroup with size 2."
    assert_all_returned(run_played(lambda transport, rank: warnings.warn(text, stacklevel=1), 2)[0])


def test_members_of_a_group_may_have_made_unlike_numbers_of_groups():
    groups = [0, 1], [0, 1, 3], [1, 2], [0, 2, 3], [2, 3]

    def program(transport, rank):
        sums = [transport.all_reduce(torch.ones(1), group, "sum", 0, "sum") for group in groups if rank in group]
        return [int(total) for total in sums]

    results, _ = run_played(program, 4)
    assert assert_all_returned(results) == [[len(group) for group in groups if rank in group] for rank in range(4)]


def test_a_sender_may_write_at_once():
    def program(transport, rank):
        x, out = torch.zeros(3), torch.empty(3)

        def exchange():
            transport.exchange(*([(1, x)], []) if rank == 0 else ([], [(0, out)]), 0, "an activation")

        exchange()  # the first one waits for the peer
        x.fill_(1)
        if rank == 0:
            exchange()
            x.fill_(2)
        transport.all_gather(torch.zeros(1), "barrier")
        if rank == 1:
            exchange()
        return out.tolist()

    results, _ = run_played(program, 2)
    assert assert_all_returned(results)[1] == [1, 1, 1]


def test_what_several_ranks_get_is_copied_once(monkeypatch):
    """Each rank that got a slice had a copy of its own at the sender."""
    copies, copy = [], distributed._copied_bytes
    monkeypatch.setattr(distributed, "_copied_bytes", lambda tensor: copies.append(len(tensor)) or copy(tensor))
    x = torch.arange(6.0).view(3, 2)
    sends = [(1, x[:2]), (2, x[:2]), (2, x[1:2])]

    def program(transport, rank):
        outs = [torch.empty(tuple(part.shape)) for peer, part in sends if peer == rank]
        transport.exchange(sends if rank == 0 else [], [(0, out) for out in outs], 0, "a batch for the next stage")
        return [out.tolist() for out in outs]

    results, _ = run_played(program, 3)
    assert assert_all_returned(results) == [[], [x[:2].tolist()], [x[:2].tolist(), x[1:2].tolist()]]
    assert copies == [2, 1]


def test_over_gloo_what_several_ranks_get_is_copied_once():
    transport, sent, x = object.__new__(GlooTransport), [], torch.arange(6.0).view(3, 2)
    transport.device, transport._start = x.device, lambda sends, *_: sent.extend(sends)
    transport.start_exchange([(1, x[:2]), (2, x[:2]), (3, x.t())], [], 0, "a batch for the next stage")
    expected = x[:2].tolist(), x[:2].tolist(), x.t().tolist()
    x.zero_()
    assert [peer for peer, _ in sent] == [1, 2, 3] and sent[0][1] is sent[1][1]
    assert all(tensor.is_contiguous() and tensor.tolist() == e for (_, tensor), e in zip(sent, expected, strict=True))


def test_handles_are_not_kept_after_the_wait(monkeypatch):
    """They hold results, and the host may be far ahead of the device."""
    monkeypatch.setattr(NcclWatchdog, "_watch", lambda self: None)

    def program(transport, rank):
        def num_kept():
            kept = [work for call in transport._watchdog._pending for work in call.works]
            return sum(isinstance(work, played_nccl.Call) for work in kept)

        x, out = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE)
        transport.exchange([(1 - rank, x)], [(1 - rank, out)], 0, "boxing")
        assert num_kept() == 0
        finish = transport.start_all_reduce([x], [0, 1], "sum", 0, "a sum")
        transport.all_gather(x, "barrier")
        assert num_kept() == 1
        finish()
        assert num_kept() == 0
        assert transport._watchdog._pending  # until the device has come there
        assert out.tolist() == [1, 1]
        assert transport._watchdog.find_hang() is None and not transport._watchdog._pending

    assert_all_returned(run_played(program, 2, device=DEVICE)[0])


def test_sent_bytes_are_counted_and_threads_end():
    def program(transport, rank):
        out = torch.empty(3)
        for number in range(20):
            transport.exchange([(1 - rank, torch.full((3,), 10.0 * rank + number))], [(1 - rank, out)], 0, "boxing")
            transport.all_gather(torch.zeros(1), "barrier")
            assert out.eq(10.0 * (1 - rank) + number).all()
        return transport.sent_bytes

    results, nccl = run_played(program, 2)
    assert assert_all_returned(results) == [240, 240] and not nccl.aborted
    assert not [thread for thread in threading.enumerate() if thread.name == "workbench-calls" and thread.is_alive()]


def test_dtypes_and_flags_that_nccl_lacks_are_sent():
    complex_ones = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 4]])
    tensors = [
        torch.arange(6, dtype=torch.int16).view(2, 3),
        torch.tensor(7, dtype=torch.int16),
        torch.tensor([True, False]),
        complex_ones,
        complex_ones.conj(),
        complex_ones.conj().imag,
        torch._neg_view(torch.arange(4.0)),
        torch.arange(6.0).view(2, 3).t(),
    ]

    def program(transport, rank):
        for tensor in tensors:
            out = torch.empty(tensor.shape, dtype=tensor.dtype)
            transport.exchange([(1 - rank, tensor)], [(1 - rank, out)], 0, "boxing")
            transport.all_gather(torch.zeros(1), "barrier")
            assert out.equal(tensor), tensor
        found = []
        for reduction in ("sum", "max", "min"):
            for dtype in (torch.int16, torch.bfloat16):
                terms = [torch.tensor([1 + rank, 5 - rank], dtype=dtype), torch.tensor([[-3 * rank]], dtype=dtype)]
                finish = transport.start_all_reduce(terms, [0, 1], reduction, 0, "a sum")
                transport.all_gather(torch.zeros(1), "barrier")
                assert finish().dtype == dtype
                found.append(finish().tolist())
        return found

    results, _ = run_played(program, 2)
    expected = [[3, 9, -3]] * 2 + [[2, 5, 0]] * 2 + [[1, 4, -3]] * 2
    assert assert_all_returned(results) == [expected, expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_maximum_keeps_nan_which_nccl_drops(dtype):
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[1, nan, 2, -inf, nan, -0.5], [3, 4, nan, -inf, nan, inf]], dtype=dtype)

    def program(transport, rank):
        waits = [transport.start_all_reduce([rows[rank]], [0, 1], name, 0, "extrema") for name in ("max", "min")]
        none = transport.start_all_reduce([rows[rank, :0]], [0, 1], "max", 0, "extrema of nothing")()
        two = transport.start_all_reduce([rows[rank, :2], rows[rank, 2:].view(2, 2)], [0, 1], "max", 0, "two tensors")()
        return *[wait() for wait in waits], two, none.shape

    results, _ = run_played(program, 2)
    for largest, smallest, two, empty in assert_all_returned(results):
        for found, expected in ((largest, rows.amax(0)), (smallest, rows.amin(0)), (two, rows.amax(0))):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert empty == (0,)


def test_collectives_of_flat_tensors_of_any_sizes_and_dtypes():
    def program(transport, rank):
        found, group = [], [0, 1, 2]
        for sizes in ([2, 2, 2], [1, 3, 0]):
            for dtype in (torch.int16, torch.bfloat16, torch.bool):
                part = torch.full((sizes[rank],), rank + 1, dtype=dtype)
                gather = transport.start_all_gather(part, sizes, group, "a gathering")
                terms = [torch.full((size,), 1 if rank else 256, dtype=dtype) for size in sizes]
                scatter = transport.start_reduce_scatter(terms, group, "a sum") if dtype != torch.bool else None
                transport.all_gather(torch.zeros(1), "barrier")
                found.append(gather().to(torch.int64).tolist())
                assert scatter is None or scatter().tolist() == [258] * sizes[rank]  # added in 32 bits
        return found

    even, uneven = [1, 1, 2, 2, 3, 3], [1, 2, 2, 2]
    expected = [even, even, [1] * 6, uneven, uneven, [1] * 4]
    assert assert_all_returned(run_played(program, 3)[0]) == [expected] * 3


def test_a_receive_never_fills_a_copy():
    def program(transport, rank):
        out = torch.empty(3, 2).t()
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            transport.exchange([(1 - rank, torch.ones(2, 3))], [(1 - rank, out)], 0, "boxing")

    results, _ = run_played(program, 2)
    assert_all_returned(results)


def test_groups_have_our_timeout(monkeypatch):
    limits_s, new_group = [], PlayedNccl.new_group
    monkeypatch.setattr(PlayedNccl, "new_group", lambda self, ranks, timeout, **options: (
        limits_s.append(timeout.total_seconds()), new_group(self, ranks, timeout, **options))[1])  # fmt: skip

    def program(transport, rank):
        if rank != 1:
            transport.all_reduce(torch.ones(1), [0, 2], "sum", 0, "sum")

    assert_all_returned(run_played(program, 3, timeout_s=30.0)[0])
    assert limits_s == [300.0] * 5
