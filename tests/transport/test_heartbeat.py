"""Heartbeats: a stopped rank that is alone on its host is detected by the ranks of other hosts."""

import os
import signal
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from tests.processes import Ranks
from workbench.errors import CollectiveAborted
from workbench.tensors.world import current
from workbench.transport.network import heartbeat
from workbench.transport.network.heartbeat import Heartbeat
from workbench.transport.rendezvous import Member

HOSTS = ("alpha boot", "alpha boot", "beta boot")


def members(*hosts):
    return [Member(host, 100 + number, 1) for number, host in enumerate(hosts)]


def all_of(hosts):
    store = HashStore()
    return store, [Heartbeat(store, members(*hosts), rank) for rank in range(len(hosts))]


def heartbeat_threads():
    return [thread for thread in threading.enumerate() if thread.name == "workbench-heartbeat"]


def test_only_ranks_alone_on_their_hosts_send_heartbeats(monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.001)
    before = len(heartbeat_threads())
    for hosts, alone_on_host in ((HOSTS, {2}), (("a", "a"), set()), (("a", "b"), {0, 1}), (("a",), set())):
        store, ranks = all_of(hosts)
        assert {rank for one in ranks for rank in one.alone_on_host} == alone_on_host
        assert len(heartbeat_threads()) - before == len(alone_on_host)
        for one in ranks:
            one.close()
        for thread in heartbeat_threads()[before:]:
            thread.join(5)
        assert store.num_keys() == len(alone_on_host)


def test_silence_is_reported_only_after_the_limit(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    store = HashStore()
    detector = Heartbeat(store, members(*HOSTS), 0)
    assert detector.silence_of(2) is None  # it has not started
    for count in range(20):
        store.set("heartbeat/2", str(count))
        now[0] += 9.0
        assert detector.silence_of(2) is None and detector.silence_of(1) is None
    now[0] += 9.0
    assert detector.silence_of(2) is None
    now[0] += 2.0
    text = detector.silence_of(2)
    assert "process 102 of rank 2, alone on beta, has given no sign of life for 11 s" in text and "SIGSTOP" in text
    store.set("heartbeat/2", "20")  # the process was continued
    assert detector.silence_of(2) is None


def test_a_longer_grace_period_also_covers_silence(monkeypatch):
    monkeypatch.setenv("WORKBENCH_STOPPED_GRACE_S", "inf")
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    store = HashStore()
    detector = Heartbeat(store, members(*HOSTS), 0)
    store.set("heartbeat/2", "0")
    for _ in range(3):
        assert detector.silence_of(2) is None
        now[0] += 1e6


def test_a_heartbeat_ends_with_its_store(monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.001)

    class Broken:
        def set(self, key, value):
            raise RuntimeError("connection reset")

    before = len(heartbeat_threads())
    Heartbeat(Broken(), members("a", "b"), 0)
    for thread in heartbeat_threads()[before:]:
        thread.join(5)
    assert len(heartbeat_threads()) == before


def stop_the_isolated_rank():
    here = current()
    here.transport.all_gather(torch.zeros(1), "a start")
    if here.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    try:
        here.transport.all_gather(torch.zeros(1), "a barrier")
    except CollectiveAborted as error:
        return str(error), time.monotonic() - started
    return "nothing happened", 0.0


@pytest.mark.procs
@pytest.mark.slow
def test_a_stopped_rank_alone_on_its_host_ends_the_waits_of_the_others():
    environment = [{"WORKBENCH_HOST": host.split()[0]} for host in HOSTS]
    with Ranks(stop_the_isolated_rank, 3, environment=environment) as ranks:
        pids = [process.pid for process in ranks.processes]
        found = {}
        for rank in (0, 1):
            assert ranks._ends[rank].poll(40)
        os.kill(pids[2], signal.SIGCONT)
        found = ranks.results()
    for text, waited_s in found[:2]:
        assert 9.0 < waited_s < 16.0
        assert f"process {pids[2]} of rank 2, alone on beta, has given no sign of life" in text
    assert "gave up" in found[2][0]
