"""Detection of hanging calls over a simulated NCCL."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.distributed import HashStore, ReduceOp

from tests.transport.shared_ranks import assert_all_returned, run_on_threads
from workbench.errors import CollectiveAborted
from workbench.transport import selection
from workbench.transport.network import distributed, nccl_watchdog
from workbench.transport.network.distributed import DistributedTransport
from workbench.transport.network.hang_detector import HAS_LEFT
from workbench.transport.network.nccl_watchdog import NcclWatchdog
from workbench.transport.rendezvous import Member, Rendezvous


class Call:
    """A handle of NCCL, done or not."""

    def __init__(self, is_done=False):
        self.is_done = is_done

    def is_completed(self):
        return self.is_done

    def wait(self):
        pass


def rendezvous_of(num_ranks, pids=None):
    return Rendezvous(HashStore(), 0, tuple(Member("alpha", pid, 1) for pid in pids or [os.getpid()] * num_ranks))


@pytest.fixture
def watches(monkeypatch):
    """Three ranks whose threads never check: the test calls ``find_hang``."""
    monkeypatch.setattr(nccl_watchdog, "SUSPECT_S", 0.0)
    monkeypatch.setattr(NcclWatchdog, "_watch", lambda self: None)
    rendezvous = rendezvous_of(3)
    return [NcclWatchdog(rendezvous, rank, 60.0, lambda reason: None) for rank in range(3)]


def test_nothing_is_written_while_all_is_well(watches):
    for watchdog in watches:
        for number in range(100):
            watchdog.record(f"call {number}", [nccl_watchdog.group_channel(range(3))], range(3), [Call(is_done=True)])
        assert watchdog.find_hang() is None
    assert watches[0]._store.num_keys() == 0 and not watches[0]._pending


def test_two_calls_with_one_number_are_reported_on_both_ranks(watches):
    one, two, _ = watches
    one.record("boxing S(0) -> B", [nccl_watchdog.send_channel(0, 1), nccl_watchdog.send_channel(1, 0)], [1], [Call()])
    assert one.find_hang() is None  # rank 1 has written nothing, it may be slow
    two.record(
        "boxing S(0) -> S(1)", [nccl_watchdog.send_channel(1, 0), nccl_watchdog.send_channel(0, 1)], [0], [Call()]
    )
    text = two.find_hang()
    assert "rank 1 stopped waiting in boxing S(0) -> S(1): ranks diverged" in text
    assert "call 1 of 1 -> 0 is boxing S(0) -> B on rank 0" in text
    assert "call 1 of 0 -> 1 is boxing S(0) -> S(1) on rank 1" in one.find_hang()


def test_a_skipped_call_is_found_at_the_next_one(watches):
    for watchdog in watches[:2]:
        for name in ("first", "second", "third"):
            if (watchdog.rank, name) != (1, "second"):
                watchdog.record(name, [nccl_watchdog.group_channel([0, 1])], [0, 1], [Call()])
    assert watches[1].find_hang() is None
    for watchdog in watches[:2]:
        watchdog._pending.popleft()
    watches[1].find_hang()
    assert "call 2 of group [0, 1] is third on rank 1" in watches[0].find_hang()


def test_each_direction_of_a_pipeline_is_counted_separately(watches):
    one, two, _ = watches
    for number in range(3):
        one.record(f"forward {number}", [nccl_watchdog.send_channel(0, 1)], [1], [Call()])
    one.record("backward 0", [nccl_watchdog.send_channel(1, 0)], [1], [Call()])
    two.record("forward 0", [nccl_watchdog.send_channel(0, 1)], [0], [Call()])
    two.record("backward 0", [nccl_watchdog.send_channel(1, 0)], [0], [Call()])
    two.record("forward 1", [nccl_watchdog.send_channel(0, 1)], [0], [Call()])
    for _ in range(4):
        for watchdog in (one, two):
            assert watchdog.find_hang() is None
            watchdog._pending and watchdog._pending.popleft()


def test_a_slow_rank_is_reported_only_at_the_timeout(watches):
    one, two, _ = watches
    two.record("first", [nccl_watchdog.group_channel([0, 1])], [0, 1], [Call()])
    one.record("first", [nccl_watchdog.group_channel([0, 1])], [0, 1], [Call()])
    one.record("second", [nccl_watchdog.group_channel([0, 1])], [0, 1], [Call()])
    one._pending.popleft()
    assert two.find_hang() is None and one.find_hang() is None
    one._timeout_s = 0.0
    assert one.find_hang() == (
        "rank 0 stopped waiting in second: it has not ended for 0 s; "
        "rank 1 has made 1 calls of group [0, 1], the last one first"
    )


def test_ranks_that_close_or_fail_are_named(watches):
    one, two, three = watches
    one.record("a sum", [nccl_watchdog.group_channel([0, 1])], [0, 1], [Call()])
    three.end(HAS_LEFT)
    assert one.find_hang() is None
    two.end(HAS_LEFT)
    assert one.find_hang().endswith("in a sum: rank 1 has left the world")
    three._how = ""
    three.end("gave up: KeyboardInterrupt")
    assert one.find_hang().endswith("in a sum: rank 2 gave up: KeyboardInterrupt")  # nobody can go on


def test_forgotten_headers_cause_no_error(watches):
    one, two, _ = watches
    one.record("old", [nccl_watchdog.send_channel(0, 1)], [1], [Call()])
    for number in range(nccl_watchdog._NUM_REMEMBERED + 5):
        two.record(f"call {number}", [nccl_watchdog.send_channel(0, 1)], [0], [Call(is_done=True)])
    two._write()
    assert one.find_hang() is None


def test_the_end_of_a_process_is_detected(monkeypatch):
    monkeypatch.setattr(nccl_watchdog, "SUSPECT_S", 0.0)
    monkeypatch.setattr(NcclWatchdog, "_watch", lambda self: None)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watchdog = NcclWatchdog(rendezvous_of(2, [os.getpid(), other.pid]), 0, 60.0, lambda reason: None)
    watchdog.record("a sum", [nccl_watchdog.group_channel([0, 1])], [0, 1], [Call()])
    assert watchdog.find_hang() is None
    other.kill()
    other.wait()
    assert watchdog.find_hang().endswith(f"in a sum: process {other.pid} of rank 1 has ended")
    watchdog.close()


def test_an_error_of_nccl_is_reported(watches):
    class Broken(Call):
        def is_completed(self):
            raise RuntimeError("NCCL error: remote process exited\nand a stack")

    watches[0].record("a sum", [nccl_watchdog.group_channel([0, 1])], [0, 1], [Broken()])
    text = watches[0].find_hang()
    assert text == "rank 0 stopped waiting in a sum: NCCL reports NCCL error: remote process exited"


KNOWN = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64}
"""Dtypes of NCCL; torch makes bools of bytes and complex numbers of pairs."""


class Nccl:
    """Matches calls by their order alone, never ends calls of different sizes, and ignores torch's conjugate bits."""

    def __init__(self, num_ranks):
        self.num_ranks, self.lock, self.waiting = num_ranks, threading.Lock(), {}
        self.num_aborted, self.local = 0, threading.local()

    def meet(self, place, num_members, size, then):
        """The next call at a place; it ends when all members have made it with the same size."""
        call = Call()
        with self.lock:
            if not hasattr(self.local, "numbers"):
                self.local.numbers = {}
            number = self.local.numbers[place] = self.local.numbers.get(place, 0) + 1
            others = self.waiting.setdefault((place, number), [])
            others.append((call, size, then))
            if len(others) == num_members and len({size for _, size, _ in others}) == 1:
                for found, _, _ in others:
                    found.is_done = True
                for _, _, act in others:
                    act(others)
        return call

    def new_group(self, ranks):
        return "downward"

    def isend(self, tensor, peer, group):
        return self.pass_on("send", tensor, (self.rank, peer), group)

    def irecv(self, tensor, peer, group):
        return self.pass_on("receive", tensor, (peer, self.rank), group)

    def pass_on(self, kind, tensor, place, group):
        """The n-th send of one rank to another meets the n-th receive, on the communicator of their direction."""
        assert tensor.dtype in KNOWN and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        assert group == (None if place[0] < place[1] else "downward")

        def act(others, held=tensor, kind=kind):  # a send reads its memory when the receive is there
            if kind == "receive":
                held.copy_(next(o[2].__defaults__[0] for o in others if o[2].__defaults__[1] == "send"))

        return self.meet(place, 2, tensor.numel(), act)

    def all_gather(self, parts, tensor, async_op):
        def act(others, parts=parts, mine=(self.rank, tensor)):
            for other in others:
                rank, theirs = other[2].__defaults__[1]
                parts[rank].copy_(theirs)

        return self.meet("all", self.num_ranks, tensor.numel(), act)

    def all_reduce(self, tensor, operation, group, async_op):
        assert tensor.dtype in KNOWN and not tensor.is_neg()
        mine = (self.rank, tensor.clone())

        def act(others, mine=mine, out=tensor):
            terms = torch.stack([term for _, term in sorted(other[2].__defaults__[0] for other in others)])
            out.copy_({ReduceOp.SUM: terms.sum, ReduceOp.MAX: terms.amax, ReduceOp.MIN: terms.amin}[operation](0))

        return self.meet("sum", self.num_ranks, tensor.numel(), act)

    @property
    def rank(self):
        return self.local.rank


def run_played(fn, num_ranks, monkeypatch, timeout_s=20.0):
    """``fn(transport, rank)`` on every rank; returns what each returned or raised, and how often NCCL was aborted."""
    nccl, rendezvous = Nccl(num_ranks), rendezvous_of(num_ranks)
    monkeypatch.setattr(distributed, "dist", nccl)
    monkeypatch.setattr(nccl_watchdog, "SUSPECT_S", 0.1)
    monkeypatch.setattr(nccl_watchdog, "LOOK_S", 0.02)
    aborted = []
    monkeypatch.setattr(distributed, "abort_calls", lambda: aborted.append(1))

    def program(rank):
        nccl.local.rank = rank
        transport = DistributedTransport(rank, num_ranks, "nccl", timeout_s, torch.device("cpu"), rendezvous)
        try:
            return fn(transport, rank)
        finally:
            transport.close()

    return run_on_threads(program, num_ranks), len(aborted)


def test_sends_are_not_waited_for_and_all_ranks_call_in_one_order(monkeypatch):
    waited, places = [], []
    monkeypatch.setattr(Call, "wait", lambda self: waited.append(self))
    passed = Nccl.pass_on
    monkeypatch.setattr(Nccl, "pass_on", lambda self, kind, tensor, place, group: (
        places.append((self.rank, place)), passed(self, kind, tensor, place, group))[1])  # fmt: skip

    def program(transport, rank):
        others = [peer for peer in (2, 1, 0) if peer != rank]
        if rank == 0:
            transport.exchange([(1, torch.ones(3))], [], 0, "an activation")
        if rank == 1:
            transport.exchange([], [(0, torch.empty(3))], 0, "an activation")
        transport.exchange([(p, torch.ones(2)) for p in others], [(p, torch.empty(2)) for p in others], 0, "boxing")
        transport.all_gather(torch.zeros(1), "barrier")

    results, _ = run_played(program, 3, monkeypatch)
    assert_all_returned(results)
    assert len(waited) == 1 + 3 * 2 + 3  # receives of the activation and of the boxing, and the barrier
    for rank in range(3):
        own = [place for of, place in places if of == rank]
        assert own[-4:] == sorted(own[-4:])


def test_a_sender_may_write_at_once(monkeypatch):
    def program(transport, rank):
        x, out = torch.ones(3), torch.empty(3)
        if rank == 0:
            transport.exchange([(1, x)], [], 0, "an activation")
            x.zero_()
        transport.all_gather(torch.zeros(1), "barrier")
        if rank == 1:
            transport.exchange([], [(0, out)], 0, "an activation")
        transport.all_gather(torch.zeros(1), "barrier")
        return out.tolist()

    results, _ = run_played(program, 2, monkeypatch)
    assert assert_all_returned(results)[1] == [1, 1, 1]


def test_sent_bytes_are_counted_and_threads_end(monkeypatch):
    def program(transport, rank):
        out = torch.empty(3)
        for number in range(20):
            transport.exchange([(1 - rank, torch.full((3,), 10.0 * rank + number))], [(1 - rank, out)], 0, "boxing")
            transport.all_gather(torch.zeros(1), "barrier")
            assert out.eq(10.0 * (1 - rank) + number).all()
        return transport.sent_bytes

    results, num_aborted = run_played(program, 2, monkeypatch)
    assert assert_all_returned(results) == [240, 240] and num_aborted == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "workbench-calls" and thread.is_alive()]


def test_dtypes_and_flags_that_nccl_lacks_are_sent(monkeypatch):
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

    results, _ = run_played(program, 2, monkeypatch)
    expected = [[3, 9, -3]] * 2 + [[2, 5, 0]] * 2 + [[1, 4, -3]] * 2
    assert assert_all_returned(results) == [expected, expected]


def test_a_receive_never_fills_a_copy(monkeypatch):
    def program(transport, rank):
        out = torch.empty(3, 2).t()
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            transport.exchange([(1 - rank, torch.ones(2, 3))], [(1 - rank, out)], 0, "boxing")

    results, _ = run_played(program, 2, monkeypatch)
    assert_all_returned(results)


def test_ranks_that_diverged_end_with_both_calls(monkeypatch):
    def program(transport, rank):
        transport.all_gather(torch.zeros(1), "a start")
        numel = 3 + rank
        transport.exchange([(1 - rank, torch.zeros(numel))], [(1 - rank, torch.zeros(numel))], 0, f"boxing of {numel}")
        end = time.monotonic() + 5
        while transport._abort_reason is None and time.monotonic() < end:
            time.sleep(1e-3)  # as a main thread that waits for the device, until NCCL's calls are ended
        transport.all_gather(torch.zeros(1), "barrier")

    started = time.monotonic()
    results, num_aborted = run_played(program, 2, monkeypatch)
    assert time.monotonic() - started < 3 and num_aborted == 2
    assert all(isinstance(result, CollectiveAborted) for result in results)
    text = " ".join(map(str, results))
    assert "ranks diverged: call 1 of" in text and "boxing of 3" in text and "boxing of 4" in text


def test_an_abort_ends_the_waits_of_all_ranks(monkeypatch):
    def program(transport, rank):
        if rank == 0:
            transport.abort("the user has had enough")
        transport.all_gather(torch.zeros(1), "barrier")

    results, num_aborted = run_played(program, 3, monkeypatch)
    assert num_aborted == 3 and "stopped in barrier: the user has had enough" in str(results[0])
    for result in results[1:]:
        assert isinstance(result, CollectiveAborted) and "rank 0 gave up: the user has had enough" in str(result)


def test_a_missing_rank_is_named_with_its_last_call(monkeypatch):
    def program(transport, rank):
        transport.all_gather(torch.zeros(1), "a start")
        if rank == 0:
            transport.all_gather(torch.zeros(1), "barrier")
        time.sleep(0.6)

    results, _ = run_played(program, 2, monkeypatch, timeout_s=0.2)
    assert isinstance(results[0], CollectiveAborted) and "barrier" in str(results[0]) and "0.2 s" in str(results[0])


def test_torchs_watchdog_comes_later_and_leaves_the_process_alive(monkeypatch):
    limits_s, environment = {}, {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(
        selection.dist,
        "init_process_group",
        lambda backend, *, timeout, **others: limits_s.update({backend: timeout.total_seconds()}),
    )
    selection.open_group("gloo", rendezvous_of(2), 0, 2, 30.0)
    assert environment == {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    selection.open_group("nccl", rendezvous_of(2), 0, 2, 30.0)
    assert limits_s == {"gloo": 30.0, "nccl": 300.0}
    assert environment == {"TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
