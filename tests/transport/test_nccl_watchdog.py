"""Detection of hanging calls over a simulated NCCL."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistBackendError, PrefixStore, TCPStore

from tests.timeouts import PROMPT_S, WAIT_TIMEOUT_S
from tests.transport import played_nccl
from tests.transport.nccl_ranks import rendezvous_of, run_played
from workbench.errors import CollectiveAborted
from workbench.transport.network import nccl_watchdog
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
            watchdog.call(
                lambda: Call(is_done=True), f"call {number}", [nccl_watchdog.group_channel(range(3))], range(3)
            )
        assert watchdog.find_hang() is None
    assert watches[0]._store.num_keys() == 0 and not watches[0]._pending


def test_a_call_is_watched_while_torch_waits_in_it_for_the_peer(watches):
    one, two, _ = watches
    found = []

    def first_on_its_communicator():
        two.end("gave up: KeyboardInterrupt")
        found.append(one.find_hang())
        raise RuntimeError("NCCL communicator was aborted")

    with pytest.raises(RuntimeError):
        one.call(first_on_its_communicator, "a sum", [nccl_watchdog.group_channel([0, 1])], [0, 1])
    assert found == ["rank 0 stopped waiting in a sum: rank 1 gave up: KeyboardInterrupt"]
    assert one.find_hang() is None  # a call that has failed is not in flight


def test_a_call_that_failed_is_not_taken_for_made(watches):
    one, two, _ = watches
    channel = nccl_watchdog.group_channel([0, 1])
    one.call(Call, "a sum", [channel], [0, 1])

    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        two.call(fails, "a sum", [channel], [0, 1])
    two.end(HAS_LEFT)
    assert one.find_hang() == f"rank 0 stopped waiting in a sum: rank 1 {HAS_LEFT}"


def test_a_later_call_stays_when_one_before_it_fails(watches):
    one, channel = watches[0], nccl_watchdog.group_channel([0, 1])

    def fails_late():
        one.call(Call, "a sum of another thread", [channel], [0, 1])
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        one.call(fails_late, "a sum", [channel], [0, 1])
    number, headers = one._calls[channel]
    assert (number, headers[-1]) == (2, "a sum of another thread") and len(one._pending) == 1


def test_a_call_that_waits_in_a_store_over_tcp_is_watched(monkeypatch):
    """torch fetches the identifier of a new communicator so, and that client then serves no other call."""
    monkeypatch.setattr(nccl_watchdog, "SUSPECT_S", 0.0)
    store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    rendezvous = Rendezvous(PrefixStore("world", store), 0, (Member("alpha", os.getpid(), 1),) * 2)
    found = queue.SimpleQueue()
    one, two = (NcclWatchdog(rendezvous, rank, WAIT_TIMEOUT_S, found.put) for rank in range(2))
    waits = threading.Thread(
        target=one.call, args=(lambda: store.get("identifier"), "a sum", [nccl_watchdog.group_channel([0, 1])], [0, 1])
    )
    waits.start()
    two.end("gave up: KeyboardInterrupt")
    assert "rank 1 gave up: KeyboardInterrupt" in found.get(timeout=WAIT_TIMEOUT_S)
    assert waits.is_alive()
    store.clone().set("identifier", "here")
    waits.join()
    one.close()


def test_two_calls_with_one_number_are_reported_on_both_ranks(watches):
    one, two, _ = watches
    one.call(Call, "boxing S(0) -> B", [nccl_watchdog.send_channel(0, 1), nccl_watchdog.send_channel(1, 0)], [1])
    assert one.find_hang() is None  # rank 1 has written nothing, it may be slow
    two.call(Call, "boxing S(0) -> S(1)", [nccl_watchdog.send_channel(1, 0), nccl_watchdog.send_channel(0, 1)], [0])
    text = two.find_hang()
    assert "rank 1 stopped waiting in boxing S(0) -> S(1): ranks diverged" in text
    assert "call 1 of 1 -> 0 is boxing S(0) -> B on rank 0" in text
    assert "call 1 of 0 -> 1 is boxing S(0) -> S(1) on rank 1" in one.find_hang()


def test_a_skipped_call_is_found_at_the_next_one(watches):
    for watchdog in watches[:2]:
        for name in ("first", "second", "third"):
            if (watchdog.rank, name) != (1, "second"):
                watchdog.call(Call, name, [nccl_watchdog.group_channel([0, 1])], [0, 1])
    assert watches[1].find_hang() is None
    for watchdog in watches[:2]:
        watchdog._pending.popleft()
    watches[1].find_hang()
    assert "call 2 of group [0, 1] is third on rank 1" in watches[0].find_hang()


def test_each_direction_of_a_pipeline_is_counted_separately(watches):
    one, two, _ = watches
    for number in range(3):
        one.call(Call, f"forward {number}", [nccl_watchdog.send_channel(0, 1)], [1])
    one.call(Call, "backward 0", [nccl_watchdog.send_channel(1, 0)], [1])
    two.call(Call, "forward 0", [nccl_watchdog.send_channel(0, 1)], [0])
    two.call(Call, "backward 0", [nccl_watchdog.send_channel(1, 0)], [0])
    two.call(Call, "forward 1", [nccl_watchdog.send_channel(0, 1)], [0])
    for _ in range(4):
        for watchdog in (one, two):
            assert watchdog.find_hang() is None
            watchdog._pending and watchdog._pending.popleft()


def test_a_slow_rank_is_reported_only_at_the_timeout(watches):
    one, two, _ = watches
    two.call(Call, "first", [nccl_watchdog.group_channel([0, 1])], [0, 1])
    one.call(Call, "first", [nccl_watchdog.group_channel([0, 1])], [0, 1])
    one.call(Call, "second", [nccl_watchdog.group_channel([0, 1])], [0, 1])
    one._pending.popleft()
    assert two.find_hang() is None and one.find_hang() is None
    one._timeout_s = 0.0
    assert one.find_hang() == (
        "rank 0 stopped waiting in second: it has not ended for 0 s; "
        "rank 1 has made 1 calls of group [0, 1], the last one first"
    )


def test_ranks_that_close_or_fail_are_named(watches):
    one, two, three = watches
    one.call(Call, "a sum", [nccl_watchdog.group_channel([0, 1])], [0, 1])
    three.end(HAS_LEFT)
    assert one.find_hang() is None
    two.end(HAS_LEFT)
    assert one.find_hang().endswith("in a sum: rank 1 has left the world")
    three._how = ""
    three.end("gave up: KeyboardInterrupt")
    assert one.find_hang().endswith("in a sum: rank 2 gave up: KeyboardInterrupt")  # nobody can go on


def test_an_error_that_torch_has_found_is_the_reason_if_no_rank_has_another_one(watches, monkeypatch):
    error = SimpleNamespace(name="SUCCESS")
    backend = SimpleNamespace(get_error=lambda: error)
    group = SimpleNamespace(_get_backend=lambda device: backend)
    groups = SimpleNamespace(pg_map=[SimpleNamespace(_get_backend=lambda device: object()), group])
    monkeypatch.setattr(nccl_watchdog, "distributed_c10d", SimpleNamespace(_world=groups))
    one, two, _ = watches
    one.call(Call, "a sum", [nccl_watchdog.group_channel([0, 1])], [0, 1])
    assert one.find_hang() is None
    error.name = "COMM_ERROR"  # the other host is gone
    assert one.find_hang().startswith(
        "rank 0 stopped waiting in a sum: NCCL reports COMM_ERROR, as when a host is lost"
    )
    two.end("gave up: KeyboardInterrupt")  # which has closed its connections
    assert one.find_hang() == "rank 0 stopped waiting in a sum: rank 1 gave up: KeyboardInterrupt"


def test_forgotten_headers_cause_no_error(watches):
    one, two, _ = watches
    one.call(Call, "old", [nccl_watchdog.send_channel(0, 1)], [1])
    for number in range(nccl_watchdog._NUM_REMEMBERED + 5):
        two.call(lambda: Call(is_done=True), f"call {number}", [nccl_watchdog.send_channel(0, 1)], [0])
    two._write()
    assert one.find_hang() is None


def test_the_end_of_a_process_is_detected(monkeypatch):
    monkeypatch.setattr(nccl_watchdog, "SUSPECT_S", 0.0)
    monkeypatch.setattr(NcclWatchdog, "_watch", lambda self: None)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watchdog = NcclWatchdog(rendezvous_of(2, [os.getpid(), other.pid]), 0, 60.0, lambda reason: None)
    watchdog.call(Call, "a sum", [nccl_watchdog.group_channel([0, 1])], [0, 1])
    assert watchdog.find_hang() is None
    other.kill()
    other.wait()
    assert watchdog.find_hang().endswith(f"in a sum: process {other.pid} of rank 1 has ended")
    watchdog.close()


def test_an_error_of_nccl_is_reported(watches):
    class Broken(Call):
        def is_completed(self):
            raise RuntimeError("NCCL error: remote process exited\nand a stack")

    watches[0].call(Broken, "a sum", [nccl_watchdog.group_channel([0, 1])], [0, 1])
    text = watches[0].find_hang()
    assert text == "rank 0 stopped waiting in a sum: NCCL reports NCCL error: remote process exited"


def recorded(function, number, state="scheduled", **others):
    entry = {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{function}",
        "input_sizes": [[25, 4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[25, 4]],
        "output_dtypes": ["Float"],
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        "time_created_ns": 1786844121207040384,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "timeout_ms": 600000,
    }
    return entry | others


RECORD = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_enqueued_collective": 8, "last_started_collective": -1, "last_completed_collective": 6}},
    "entries": [
        recorded("all_reduce", 6, "completed"),
        recorded("all_reduce", 7),
        recorded("send 0->1", 8, is_p2p=True, p2p_seq_id=3, process_group=["1", "undefined"]),
        recorded("coalesced", 8, input_sizes=[], output_sizes=[]),
        recorded("all_gather", 9),
    ],
}
"""A dump of torch's flight recorder."""


def test_a_hang_says_what_nccl_has_not_ended(watches, monkeypatch):
    asked = []

    def dump(**options):
        asked.append(options)
        return json.dumps(RECORD).encode()

    one, two, _ = watches
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    one.call(Call, "a sum", [nccl_watchdog.group_channel([0, 1])], [0, 1])
    assert one.find_hang() is None and not asked
    two.end(HAS_LEFT)
    assert one.find_hang() == (
        "rank 0 stopped waiting in a sum: rank 1 has left the world. NCCL has not ended 4 calls: all_reduce of "
        "[25, 4], number 7 of group default_pg [0, 1]; send 0->1 of [25, 4], number 3 of group 1; coalesced, number 8 "
        "of group default_pg [0, 1]; and 1 more"
    )
    assert asked == [{"includeCollectives": True, "onlyActive": True}]
    for text, found in ((b"{}", ""), (b"{", ". torch's record of NCCL cannot be read: Expecting")):
        monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda text=text, **options: text)
        assert one.find_hang().split("has left the world")[1].startswith(found)


def test_ranks_that_diverged_end_with_both_calls():
    def program(transport, rank):
        transport.all_gather(torch.zeros(1), "a start")
        numel = 3 + rank
        transport.exchange([(1 - rank, torch.zeros(numel))], [(1 - rank, torch.zeros(numel))], 0, f"boxing of {numel}")
        end = time.monotonic() + 2 * PROMPT_S
        while transport._abort_reason is None and time.monotonic() < end:
            time.sleep(1e-3)  # as a main thread that waits for the device, until NCCL's calls are ended
        transport.all_gather(torch.zeros(1), "barrier")

    started = time.monotonic()
    results, nccl = run_played(program, 2, finds_stalls=False)
    assert time.monotonic() - started < PROMPT_S and nccl.aborted == {0, 1}
    assert all(isinstance(result, CollectiveAborted) for result in results)
    text = " ".join(map(str, results))
    assert "ranks diverged: call 1 of" in text and "boxing of 3" in text and "boxing of 4" in text


def test_an_abort_ends_the_waits_of_all_ranks():
    def program(transport, rank):
        if rank == 0:
            transport.abort("the user has had enough")
        transport.all_gather(torch.zeros(1), "barrier")

    results, nccl = run_played(program, 3, finds_stalls=False)
    assert nccl.aborted == {0, 1, 2} and "stopped in barrier: the user has had enough" in str(results[0])
    for result in results[1:]:
        assert isinstance(result, CollectiveAborted) and "rank 0 gave up: the user has had enough" in str(result)


def test_a_failure_of_nccl_ends_the_world(monkeypatch):
    wait = played_nccl.Call.wait

    def fails_on_rank_0(call):
        if call.rank == 0 and call.parts[0].kind == "sum":
            raise DistBackendError("unhandled system error\nconnection closed by a remote peer")
        wait(call)

    monkeypatch.setattr(played_nccl.Call, "wait", fails_on_rank_0)

    def program(transport, rank):
        transport.all_reduce(torch.ones(1), [0, 1], "sum", 0, "the loss")
        transport.all_gather(torch.zeros(1), "barrier")

    results, _ = run_played(program, 2, finds_stalls=False)
    assert all(isinstance(result, CollectiveAborted) for result in results)
    assert "rank 0 stopped in the loss, sum of 1: NCCL reports unhandled system error" in str(results[0])
    assert "in barrier" in str(results[1]) and "rank 0 gave up: NCCL reports unhandled system error" in str(results[1])


def test_a_missing_rank_is_named_with_its_last_call():
    def program(transport, rank):
        transport.all_gather(torch.zeros(1), "a start")
        if rank == 0:
            transport.all_gather(torch.zeros(1), "barrier")
        time.sleep(0.6)

    results, _ = run_played(program, 2, timeout_s=0.2, finds_stalls=False)
    assert isinstance(results[0], CollectiveAborted) and "barrier" in str(results[0]) and "0.2 s" in str(results[0])


def test_a_channel_that_a_rank_does_not_open_ends_with_both_calls():
    def program(transport, rank):
        if rank == 0:
            transport.open_channel(", stage 0 -> 2", [])
        transport.all_gather(torch.zeros(1), "barrier")

    started = time.monotonic()
    results, _ = run_played(program, 2, finds_stalls=False)
    assert time.monotonic() - started < PROMPT_S
    assert all(isinstance(result, CollectiveAborted) for result in results)
    text = " ".join(map(str, results))
    assert "ranks diverged: call 2 of group [0, 1]" in text and "open channel, stage 0 -> 2" in text
    assert "barrier" in text


def test_a_group_that_a_rank_does_not_make_ends_with_the_call_that_needs_it():
    def program(transport, rank):
        if rank == 0:
            transport.all_reduce(torch.ones(1), [0, 1], "sum", 0, "the loss")
        time.sleep(0.6)

    results, _ = run_played(program, 3, timeout_s=0.2, finds_stalls=False)
    assert isinstance(results[0], CollectiveAborted) and "the loss" in str(results[0]) and "0.2 s" in str(results[0])
