"""Shared memory when something goes wrong: every wait ends with the cause, and nothing is left behind."""

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.timeouts import PROMPT_S
from tests.transport.shared_ranks import ThreadGather, assert_all_returned, run_on_threads, run_shared
from workbench.errors import CollectiveAborted, WorldError
from workbench.transport import selection
from workbench.transport.messaging import shared_memory
from workbench.transport.shared import transport as shared
from workbench.transport.threads import ThreadHub, ThreadTransport

ROOT = Path(__file__).parents[2]


def timed(action):
    """The ``CollectiveAborted`` that ``action`` raises, and after how many seconds."""
    started = time.perf_counter()
    with pytest.raises(CollectiveAborted) as caught:
        action()
    return str(caught.value), time.perf_counter() - started


def receive(transport, source, header="receive"):
    transport.exchange([], [(source, torch.zeros(3))], 1, header)


def test_ranks_in_different_calls_get_both_names():
    def program(transport, rank):
        call = "boxing of x" if rank == 0 else "boxing of y"
        return timed(lambda: transport.exchange([(1 - rank, torch.ones(2))], [(1 - rank, torch.ones(2))], 5, call))

    for text, time_s in assert_all_returned(run_shared(program)):
        assert "diverged" in text and "boxing of x" in text and "boxing of y" in text
        assert time_s < 1


def test_ranks_with_different_shapes_get_both_sizes():
    def program(transport, rank):
        return timed(lambda: transport.all_reduce(torch.ones(10 + rank), [0, 1], "sum", 5, "reduction"))

    texts = [text for text, _ in assert_all_returned(run_shared(program))]
    assert any("40" in text and "44" in text and "diverged" in text for text in texts)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_cycle_of_waiting_ranks_is_found(num_ranks):
    """Tags differ, so no message matches; without the search for deadlocks all ranks would wait for the timeout."""

    def program(transport, rank):
        return timed(lambda: receive(transport, (rank + 1) % num_ranks, f"call {rank}"))

    for text, time_s in assert_all_returned(run_shared(program, num_ranks)):
        assert "diverged" in text and all(f"call {rank} at test_shared" in text for rank in range(num_ranks))
        assert time_s < 1


def test_a_slow_rank_is_no_deadlock():
    def program(transport, rank):
        for round_ in range(3):
            if rank == round_ % 2:
                time.sleep(0.15)
            transport.all_gather(torch.zeros(1), "gather")
            receives = [(1 - rank, torch.zeros(3))]
            transport.exchange([(1 - rank, torch.zeros(3))], receives, round_, "exchange")
        return "done"

    assert assert_all_returned(run_shared(program)) == ["done", "done"]


def test_a_waiting_rank_yields_its_core():
    def program(transport, rank):
        if rank == 1:
            time.sleep(0.6)
        started = time.thread_time()
        transport.all_gather(torch.zeros(1), "gather")
        return time.thread_time() - started

    assert max(assert_all_returned(run_shared(program))) < 0.1


def test_an_abort_from_another_thread_ends_the_wait_and_the_world():
    def program(transport, rank):
        if rank == 1:
            time.sleep(0.3)  # not waiting, so rank 0 cannot know that it waits in vain
            return timed(lambda: receive(transport, 0))
        aborted_s = []

        def abort():
            aborted_s.append(time.perf_counter())
            transport.abort("the user said so")

        threading.Timer(0.1, abort).start()
        text, _ = timed(lambda: receive(transport, 1))
        took_s = time.perf_counter() - aborted_s[0]
        again, _ = timed(lambda: transport.all_gather(torch.zeros(1), "next"))
        assert "the user said so" in again
        return text, took_s

    (text, took_s), (texts, _) = assert_all_returned(run_shared(program))
    assert "receive" in text and "the user said so" in text and took_s < 0.1
    assert "rank 0 gave up" in texts and "the user said so" in texts


def test_peers_of_a_rank_that_closes_after_an_abort_get_the_reason():
    def program(transport, rank):
        if rank == 1:
            return timed(lambda: receive(transport, 0))
        transport.abort("enough")
        return None

    text, time_s = assert_all_returned(run_shared(program))[1]
    assert "rank 0 gave up: enough" in text and time_s < 1


def test_a_wait_ends_after_the_timeout():
    def program(transport, rank):
        if rank == 1:
            time.sleep(0.6)
            return None
        return timed(lambda: receive(transport, 1))

    text, time_s = assert_all_returned(run_shared(program, timeout_s=0.2))[0]
    assert (
        "rank 0 stopped waiting for rank 1 in receive" in text
        and "nothing came for 0.2 s; rank 1 waits for no rank" in text
    )
    assert 0.2 <= time_s < 0.5


def test_a_rank_that_has_left_is_named_after_its_last_messages_are_read():
    numel = shared.FIRST_CHUNK_BYTES // 4 + 5

    def program(transport, rank):
        if rank == 1:
            transport.exchange([(0, torch.full((numel,), 3.0))], [], 1, "receive")
            return None
        time.sleep(0.2)
        out = torch.zeros(numel)
        transport.exchange([], [(1, out)], 1, "receive")
        assert out.eq(3).all()
        return timed(lambda: receive(transport, 1))[0]

    assert "rank 1 has left the world" in assert_all_returned(run_shared(program))[0]


def test_too_little_memory_is_an_error_with_both_sizes_on_all_ranks(monkeypatch):
    def program(transport, rank):
        transport.all_gather(torch.zeros(1), "start")
        if rank == 0:
            monkeypatch.setattr(shared_memory, "available_bytes", lambda: 20_000_000)
            with pytest.raises(WorldError) as caught:
                transport.exchange([(1, torch.zeros(10_000_000))], [], 1, "receive")
            return str(caught.value)
        return timed(lambda: receive(transport, 0))[0]

    refused, texts = assert_all_returned(run_shared(program))
    assert "rank 0 in receive" in refused and "40.9 MB" in refused and "18.0 MB" in refused and "gloo" in refused
    assert "40.9 MB" in texts


def test_too_many_open_files_are_an_error_for_messages_and_none_for_tensors(monkeypatch):
    """A tensor with room in ordinary memory ended the world, too."""

    def program(transport, rank):
        transport.all_gather(torch.zeros(1), "start")
        if rank == 0:
            monkeypatch.setattr(shared_memory, "memory_file", full)
            assert transport._segment.empty((10_000_000,), torch.float32).numel() == 10_000_000
            with pytest.raises(WorldError) as caught:
                transport.exchange([(1, torch.zeros(10_000_000))], [], 1, "receive")
            return str(caught.value)
        return timed(lambda: receive(transport, 0))[0]

    def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    refused, text = assert_all_returned(run_shared(program))
    assert "rank 0 in receive" in refused and "Too many open files (`ulimit -n`" in refused and "ulimit" in text


def select(num_ranks, names=(), **broken):
    """The transport of each rank; ``names`` are the values of WORKBENCH_TRANSPORT."""
    gather, hub = ThreadGather(num_ranks), ThreadHub(num_ranks)
    with pytest.MonkeyPatch.context() as patch:
        ranks = {}
        patch.setattr(
            selection, "requested_by_environment", lambda: names[ranks[threading.get_ident()]] if names else "auto"
        )
        for name, value in broken.items():
            patch.setattr(selection, name, lambda *args, value=value: value(ranks[threading.get_ident()]))

        def program(rank):
            ranks[threading.get_ident()] = rank
            chosen = selection.select_transport(ThreadTransport(hub, rank), gather.of(rank), rank, num_ranks, 5.0)
            chosen.close()
            return chosen.name

        return run_on_threads(program, num_ranks)


def test_shared_memory_is_selected_where_all_ranks_can():
    assert select(3) == ["shared"] * 3


def test_one_refusal_or_another_host_is_enough():
    assert select(2, names=["auto", "gloo"]) == ["threads"] * 2
    assert select(2, host_name=lambda rank: f"host{rank}") == ["threads"] * 2
    assert select(2, make_control_page=lambda rank: (None, "no memory")) == ["threads"] * 2


def test_a_request_for_shared_memory_is_met_or_explained():
    assert select(2, names=["shared", "shared"]) == ["shared"] * 2
    for error in select(2, names=["shared", "auto"], host_name=lambda rank: f"host{rank}"):
        assert isinstance(error, WorldError)
        assert "1 of 2 ranks" in str(error) and "host1" in str(error) and "Unset WORKBENCH_TRANSPORT" in str(error)


def test_too_little_memory_to_join_is_an_error_with_both_sizes(monkeypatch):
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 1_000_000)
    assert select(2) == ["threads"] * 2
    for error in select(2, names=["shared", "shared"]):
        assert isinstance(error, WorldError) and "2 of 2 ranks cannot share memory" in str(error)
        assert f"{shared.FIRST_CHUNK_BYTES / 1e6:.1f} MB of shared memory are wanted, 900 kB are available" in str(
            error
        )


def test_a_process_that_is_not_the_peer_is_detected(monkeypatch):
    monkeypatch.setattr(selection.ControlPage, "token", property(lambda page: int(time.perf_counter_ns())))
    assert select(2) == ["threads"] * 2


def test_an_unknown_transport_is_an_error(monkeypatch):
    monkeypatch.setenv(selection.VARIABLE, "pigeon")
    with pytest.raises(WorldError, match="pigeon"):
        selection.requested_by_environment()


def test_available_memory_respects_control_groups(tmp_path):
    inner = tmp_path / "job" / "rank"
    inner.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/job/rank\n")
    for folder, limit, used in [(inner, "max", 10), (inner.parent, "5000", 3000)]:
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 7\ninactive_file 500\n")
    assert list(shared_memory._room_in_control_groups(tmp_path, own)) == [2500]
    own.write_text("12:memory:/job\n")
    assert list(shared_memory._room_in_control_groups(tmp_path, own)) == []


class Ranks:
    """Processes that execute commands (``scripted_rank``)."""

    def __init__(self, num_ranks):
        command = [sys.executable, "-m", "tests.transport.scripted_rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(num_ranks)}
        self.processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        self._answers = [queue.SimpleQueue() for _ in self.processes]
        for process, answers in zip(self.processes, self._answers, strict=True):
            threading.Thread(
                target=lambda p=process, a=answers: [a.put(line) for line in p.stdout], daemon=True
            ).start()
        assert [self.answer(rank, 60) for rank in range(num_ranks)] == ["ready"] * num_ranks

    def tell(self, command, *ranks):
        for rank in ranks:
            self.processes[rank].stdin.write(command + "\n")
            self.processes[rank].stdin.flush()

    def answer(self, rank, timeout_s=10):
        return json.loads(self._answers[rank].get(timeout=timeout_s))

    def ask(self, command, *ranks):
        """The answers of ``ranks`` to ``command``, in order."""
        self.tell(command, *ranks)
        return [self.answer(rank).get("result") for rank in ranks]

    def signal(self, number, *ranks):
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@pytest.fixture(scope="module")
def three_ranks():
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.mark.procs
@pytest.mark.timed
def test_interrupted_stopped_and_killed_processes(three_ranks, tmp_path):
    """One test, because processes take seconds to start: after each fault the ranks join a new world."""
    before, ranks = set(os.listdir("/dev/shm")), three_ranks

    def join(name):
        assert ranks.ask(f"join {tmp_path / name} 20", 0, 1, 2) == ["shared"] * 3
        assert ranks.ask("gather", 0, 1, 2) == [[0, 1, 2]] * 3

    join("first")
    for files in ranks.ask("files", 0, 1, 2):
        assert len(files) == 6 and all("/memfd:workbench (deleted)" in file for file in files)
    ranks.ask("set_timeout 0.5", 0, 1, 2)

    ranks.signal(signal.SIGSTOP, 2)
    ranks.tell("gather", 0, 1)
    answers = [ranks.answer(rank) for rank in (0, 1)]
    ranks.signal(signal.SIGCONT, 2)
    assert all("the test's gather" in answer["error"] and answer["time_s"] < PROMPT_S for answer in answers)
    assert any("is stopped (SIGSTOP)" in answer["error"] for answer in answers)
    ranks.ask("leave", 0, 1, 2)

    join("second")
    ranks.tell("gather", 0, 1)
    time.sleep(0.3)
    sent_s = time.perf_counter()
    ranks.signal(signal.SIGINT, 0)
    assert "KeyboardInterrupt" in ranks.answer(0)["error"]
    assert time.perf_counter() - sent_s < PROMPT_S
    assert "rank 0 gave up: KeyboardInterrupt" in ranks.answer(1)["error"]
    ranks.ask("leave", 0, 1, 2)

    join("third")
    assert {len(files) for files in ranks.ask("files", 0, 1, 2)} == {6}  # nothing is left of the worlds before
    ranks.tell("gather", 0, 1)
    time.sleep(0.2)
    killed_s = time.perf_counter()
    ranks.signal(signal.SIGKILL, 2)
    answers = [ranks.answer(rank) for rank in (0, 1)]
    assert time.perf_counter() - killed_s < PROMPT_S
    assert all(f"process {ranks.processes[2].pid} of rank 2 has ended" in answer["error"] for answer in answers)

    ranks.signal(signal.SIGKILL, 0, 1)
    for process in ranks.processes:
        process.wait()
    assert set(os.listdir("/dev/shm")) <= before
