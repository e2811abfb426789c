"""The transport over CUDA IPC, on a fake device whose work runs late and whose memory is checked."""

import os
import random
import signal
import threading
import time

import pytest
import torch

import workbench.tensors.install  # noqa: F401 - installs the patches of torch
from tests.processes import run_processes
from tests.tensors.boxing.casts import GRIDS_OF_4, check_casts, run_casts, sampled
from tests.timeouts import WAIT_TIMEOUT_S
from tests.training.programs import training_equals_one_device
from tests.transport import late_device
from tests.transport.late_ranks import connect_on_threads, run_late, run_late_worlds
from tests.transport.shared_ranks import assert_all_returned
from tests.transport.test_shared_memory import FLOATS, OTHERS, reduced, values
from workbench.errors import CollectiveAborted, WorldError
from workbench.tensors.world import current
from workbench.transport.ipc import connect as ipc_connect
from workbench.transport.ipc import events, pool
from workbench.transport.ipc import transport as ipc
from workbench.transport.ipc.handles import ON_DEVICE, ON_HOST


def behaviours(num_ranks, **different):
    """One behaviour per rank; ``different`` holds a list of values by attribute."""
    found = [late_device.Behaviour() for _ in range(num_ranks)]
    for name, by_rank in different.items():
        for behaviour, value in zip(found, by_rank, strict=True):
            setattr(behaviour, name, value)
    return found


def exchange_all(transport, rank, num_ranks, rounds=4):
    """All ranks send to all ranks and reduce; the results equal one device."""
    peers = [peer for peer in range(num_ranks) if peer != rank]
    for tag in range(rounds):
        numel = (3, 1000, 70_001)[tag % 3]
        outs = [torch.empty(numel) for _ in peers]
        sends = [(peer, torch.full((numel,), 100.0 * tag + 10 * rank + peer)) for peer in peers]
        transport.exchange(sends, list(zip(peers, outs, strict=True)), tag, f"round {tag}")
        for _, tensor in sends:
            tensor.fill_(-1.0)
        for peer, out in zip(peers, outs, strict=True):
            assert out.eq(100.0 * tag + 10 * peer + rank).all()
        total = transport.all_reduce(torch.full((numel,), rank + 1.0), range(num_ranks), "sum", tag, f"sum {tag}")
        assert total.eq(num_ranks * (num_ranks + 1) / 2).all()
    return [int(part) for part in transport.all_gather(torch.tensor(rank), "the end")]


def test_casts_equal_one_device_and_move_the_bytes_of_their_plans():
    casts = sampled(GRIDS_OF_4, 25, seed=3)
    check_casts(casts, assert_all_returned(run_late_worlds(lambda world: run_casts(casts, world.rank), 4)))


@pytest.mark.parametrize("way", ["one step", "two steps"])
def test_every_rank_gets_the_bits_of_the_ordered_sum(way, monkeypatch):
    monkeypatch.setattr(ipc, "ONE_SHOT_BYTES", -1 if way == "two steps" else 1 << 30)
    cases = [
        (group, numel, dtype, reduction)
        for group in ([0, 1, 2], [2, 0, 1], [1, 2])
        for numel in (0, 1, 7, 7001)
        for dtype in FLOATS + OTHERS
        for reduction in ("sum", "max", "min")
        if not (dtype.is_complex and reduction != "sum")
    ]
    random.Random(0).shuffle(cases)
    cases = cases[:16]

    def program(transport, rank):
        found = []
        for tag, (group, numel, dtype, reduction) in enumerate(cases):
            member = rank in group
            own = values(rank, numel, dtype)
            found.append(transport.all_reduce(own, group, reduction, tag, f"case {tag}") if member else None)
        return found

    results = assert_all_returned(run_late(program, 3))
    for index, (group, numel, dtype, reduction) in enumerate(cases):
        for rank in group:
            assert torch.equal(results[rank][index], reduced(group, numel, dtype, reduction)), cases[index]


def test_exchanges_of_every_dtype_any_strides_and_empty_tensors():
    def program(transport, rank):
        other = 1 - rank
        for tag, dtype in enumerate(FLOATS + OTHERS):
            for shape in ((0, 3), (1, 1), (6, 11)):
                numel = shape[0] * shape[1]
                sent = values(rank, numel, dtype).view(shape).t()
                sent = sent.conj().resolve_conj().conj() if dtype.is_complex else sent  # a flag, twice the same values
                out = torch.empty(shape[::-1], dtype=dtype)
                sends, wanted = [(other, sent)], [(other, shape[::-1])]
                pieces, release = transport.start_exchange_in_place(sends, wanted, dtype, tag, "exchange")()
                out.copy_(pieces[0])
                release()
                assert torch.equal(out, values(other, numel, dtype).view(shape).t())
        return transport.sent_bytes

    sizes = {dtype.itemsize for dtype in FLOATS + OTHERS}
    sent = sum(67 * dtype.itemsize for dtype in FLOATS + OTHERS)
    assert len(sizes) > 3 and assert_all_returned(run_late(program)) == [sent, sent]


def test_a_reduction_starts_without_waiting_and_frees_its_memory():
    first_has_started = threading.Event()

    def program(transport, rank):
        if rank == 1:
            assert first_has_started.wait(WAIT_TIMEOUT_S)  # rank 0 has got here although rank 1 has done nothing yet
        big = torch.arange(300_000.0).view(3, -1).t()
        terms = [torch.full((3,), rank + 1.0), big * (rank + 1)]
        finish = transport.start_all_reduce(terms, [0, 1], "sum", 4, "sum")
        first_has_started.set()
        total = finish()
        for tag in range(30):
            transport.all_reduce(torch.ones(100_000), [0, 1], "sum", tag, "sum")
        transport.all_gather(torch.zeros(1), "the end")
        return total[:3].tolist(), torch.equal(total[3:].view_as(big), big * 3), transport.idle_bytes

    for result in assert_all_returned(run_late(program)):
        assert result == ([3.0] * 3, True, pool.FIRST_CHUNK_BYTES)


def test_without_waiting_for_events_a_rank_reads_too_early(monkeypatch):
    """Otherwise the tests of this file would not prove that events order the devices."""

    def program(transport, rank):
        if rank == 0:
            transport._device.later(lambda: time.sleep(0.1))
        return exchange_all(transport, rank, 2)

    assert assert_all_returned(run_late(program)) == [[0, 1], [0, 1]]
    monkeypatch.setattr(events.PeerEvents, "is_done", lambda self, number: True)
    assert any(isinstance(result, (AssertionError, CollectiveAborted)) for result in run_late(program))


def test_an_idle_chunk_is_freed_after_all_ranks_have_closed_it(monkeypatch):
    monkeypatch.setattr(pool, "_IDLE_ALLOCATIONS", 8)

    def program(transport, rank):
        sizes = []
        for round_ in range(2):
            big = torch.full((6_000_000,), 10.0 * round_ + rank)
            out = torch.empty(6_000_000)
            transport.exchange([(1 - rank, big)], [(1 - rank, out)], round_, "big")
            assert out.eq(10.0 * round_ + 1 - rank).all()
            sizes.append(transport.idle_bytes)
            for tag in range(20):
                transport.exchange([(1 - rank, big[:5])], [(1 - rank, out[:5])], tag, "small")
            time.sleep(0.05)
            transport.exchange([(1 - rank, big[:5])], [(1 - rank, out[:5])], 99, "small")
            sizes.append(transport.idle_bytes)
        return sizes, len(transport._transfers.peers[1 - rank].opened._memory)

    for sizes, num_opened in assert_all_returned(run_late(program)):
        assert min(sizes[::2]) >= pool.FIRST_CHUNK_BYTES + 24_000_000
        assert all(size % (2 * 2**20) == 0 for size in sizes)  # a handle opens whole pages of a GPU
        assert sizes[1::2] == [pool.FIRST_CHUNK_BYTES] * 2 and num_opened == 1


def test_freeing_open_memory_is_detected():
    """The oracle of the tests above."""
    owner, reader = late_device.LateDevice(), late_device.LateDevice()
    memory = owner.allocate(64, "test")
    opened = reader.open(owner.export(memory), 64)
    late_device.mistakes.clear()
    owner.free(memory)
    assert len(late_device.mistakes) == 1 and "had it open" in late_device.mistakes.pop()
    reader.close(opened)


def test_memory_of_a_broken_world_is_kept_while_a_rank_has_it_open():
    left, seen = threading.Event(), []

    def program(transport, rank):
        transport.all_gather(torch.tensor(rank), "a start")
        if rank == 0:
            transport.abort("the test said so")
            transport.close()
            seen.append(pool.free_deferred())  # rank 1 has its memory open
            left.set()
        else:
            assert left.wait(WAIT_TIMEOUT_S)
        return True

    assert_all_returned(run_late(program))
    assert seen == [1]


@pytest.mark.parametrize(
    ("different", "staged"),
    [
        ({"shares_memory": [False, True, True]}, {(0, 1), (0, 2)}),
        ({"garbles": [False, True, False]}, {(0, 1), (2, 1)}),
        ({"refuses": [None, lambda pid, file: True, None]}, {(0, 1), (2, 1)}),
        ({"shares_memory": [False] * 3}, {(a, b) for a in range(3) for b in range(3) if a != b}),
        ({"shares_events": [True, False, True]}, set()),
        ({"opens_events": [True, True, False]}, set()),
    ],
)
def test_unreadable_device_memory_is_staged_through_the_host(different, staged):
    def program(connection, rank):
        assert exchange_all(connection.transport, rank, 3) == [0, 1, 2]
        peers = connection.transport._transfers.peers
        assert {peer for peer in peers if peers[peer].chunk_kind == ON_HOST} == {b for a, b in staged if a == rank}
        assert not [device for device in [connection.transport._device] if device.pinned] or staged
        return connection.staged

    for found in assert_all_returned(connect_on_threads(program, 3, behaviours(3, **different))):
        assert set(found) == staged
        for why in found.values():
            assert "no handle" in why or "other bytes" in why or "peer access" in why


def test_ranks_without_shared_host_memory_are_refused_on_all_ranks():
    def program(connection, rank):
        return connection.transport, connection.refusals

    devices = behaviours(2, room=[None, 1000])
    for transport, refusals in assert_all_returned(connect_on_threads(program, 2, devices)):
        assert transport is None and set(refusals) == {1}
        assert "rank 1 joins the world" in refusals[1] and "are wanted" in refusals[1]


def test_too_little_memory_names_the_rank_and_both_sizes():
    def program(transport, rank):
        transport._device.behaviour.room = 1000
        with pytest.raises(WorldError, match=r"rank \d in a boxing: data for other ranks: \d+ bytes are wanted"):
            transport.exchange([(1 - rank, torch.ones(10_000_000))], [], 0, "a boxing")
        return True

    assert all(assert_all_returned(run_late(program)))


def test_ranks_in_different_exchanges_get_both_names():
    def program(transport, rank):
        transport.exchange([(1 - rank, torch.ones(3))], [(1 - rank, torch.empty(3))], 0, f"call {rank}")

    text = " ".join(map(str, run_late(program)))
    assert "ranks diverged" in text and "call 0" in text and "call 1" in text


def test_an_abort_ends_the_wait_for_a_device():
    def program(transport, rank):
        if rank == 0:
            transport._device.later(lambda: time.sleep(0.3))
            transport.exchange([(1, torch.ones(3))], [], 0, "a boxing")
            return 0.0
        threading.Timer(0.1, transport.abort, ["the user has had enough"]).start()
        started = time.monotonic()
        with pytest.raises(CollectiveAborted, match=r"waiting for rank 0 in a boxing.*: the user has had enough"):
            transport.exchange([], [(0, torch.empty(3))], 0, "a boxing")
        return time.monotonic() - started

    _, waited = assert_all_returned(run_late(program))
    assert 0.05 < waited < 0.25


def test_a_hanging_device_is_a_timeout_that_names_it():
    def program(transport, rank):
        if rank == 0:
            transport._device.later(lambda: time.sleep(0.5))
            transport.exchange([(1, torch.ones(3))], [], 0, "a boxing")
            return ""
        with pytest.raises(CollectiveAborted) as error:
            transport.exchange([], [(0, torch.empty(3))], 0, "a boxing")
        return str(error.value)

    text = assert_all_returned(run_late(program, timeout_s=0.1))[1]
    assert "its device has not reached this call for 0.1 s" in text and "rank 0 waits for no rank" in text


def test_cpu_ranks_never_use_ipc():
    assert set(ipc_connect.DEVICE_TYPES) == {"cuda"} and ON_DEVICE != ON_HOST


def train():
    assert current().transport_name == "ipc"
    options = ("data", "model", "pipeline", "hybrid")
    return max(max(training_equals_one_device("mlp", strategy, 4, steps=3)) for strategy in options)


@pytest.mark.procs
@pytest.mark.slow
def test_training_on_processes_equals_one_device():
    environment = {"WORKBENCH_TRANSPORT": "ipc", late_device.VARIABLE: "1"}
    assert max(run_processes(train, 4, environment=environment)) < 1e-5


def leave_something(folder):
    """Send a large message that nobody reads; then all processes are killed at once."""
    world = current()
    world.transport.exchange([(1 - world.rank, torch.ones(8_000_000))], [], 0, "a boxing")
    (folder / str(world.rank)).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(1e-3)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.procs
@pytest.mark.timed
def test_no_shared_memory_is_left_when_all_ranks_are_killed(tmp_path):
    before = set(os.listdir("/dev/shm"))
    environment = {"WORKBENCH_TRANSPORT": "ipc", late_device.VARIABLE: "1"}
    assert run_processes(leave_something, 2, tmp_path, environment=environment) == [None, None]
    assert set(os.listdir("/dev/shm")) <= before
