"""Rebuilding a broken world: what stays usable, which ranks may join, and the errors when a rank is missing."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

import workbench as wb
from tests.processes import Ranks
from tests.timeouts import WAIT_TIMEOUT_S
from workbench.errors import CollectiveAborted, WorldError
from workbench.tensors import default_generator, world
from workbench.transport import peer_processes, rendezvous
from workbench.transport.network.hang_detector import ACKS, MESSAGES, WaitStatus, acks_key, find_deadlock


def deadlock(**statuses):
    """The deadlock that rank 0 finds; ``statuses`` by rank, as r0=WaitStatus(...)."""
    return find_deadlock(0, statuses["r0"], lambda rank: statuses.get(f"r{rank}", WaitStatus()))


@pytest.mark.parametrize(("device", "has_threads_of_its_own"), [("cpu", True), ("cuda:0", False)])
def test_a_backward_runs_where_it_is_called_so_that_its_waits_can_be_interrupted(device, has_threads_of_its_own):
    with torch.autograd.set_multithreading_enabled(True):
        world.run_backward_in_calling_thread(torch.device(device))
        assert torch._C._is_multithreading_enabled() is has_threads_of_its_own


def test_a_deadlock_is_reported_with_all_calls():
    text = deadlock(r0=WaitStatus(1, 7, "x"), r1=WaitStatus(2, 7, "y"), r2=WaitStatus(0, 9, "z"))
    assert "diverged" in text and all(call in text for call in ("rank 0 waits for rank 1 in x", "in y", "in z"))
    assert "diverged" in deadlock(
        r0=WaitStatus(1, 7, "x"), r1=WaitStatus(2, 7, "y"), r2=WaitStatus(1, 9, "z")
    )  # one that leads into a ring


def test_a_pending_message_is_no_deadlock():
    waiting = {"r0": WaitStatus(1, 7, "x")}
    assert deadlock(**waiting, r1=WaitStatus()) is None  # computes
    assert deadlock(**waiting, r1=WaitStatus(0, 9, "y", sent={"0": (1, [7])})) is None  # is about to be fetched
    assert deadlock(**waiting, r1=WaitStatus(0, 9, "y", sent={"0": (1, [])})) is None  # has left the sender
    assert (
        deadlock(r0=WaitStatus(1, 7, "x", 1), r1=WaitStatus(0, 9, "y", sent={"0": (2, [8])})) is not None
    )  # another one is pending
    assert deadlock(r0=WaitStatus(1, 7, "x", 1), r1=WaitStatus(0, 9, "y", 3, sent={"0": (1, [])})) is not None


def test_an_outdated_status_is_no_deadlock():
    """Rank 1 has received the message of its status long ago: rank 0 knows that it has sent it."""
    assert deadlock(r0=WaitStatus(1, 7, "x", sent={"1": (1, [])}), r1=WaitStatus(0, 9, "y", 0)) is None


def test_messages_and_acks_are_counted_separately():
    waits_for_ack = WaitStatus(1, ACKS, "x", 4, sent={"1": (2, [])})
    assert deadlock(r0=waits_for_ack, r1=WaitStatus(0, MESSAGES, "y", 2, sent={"0": (9, []), acks_key(0): (4, [])}))
    assert not deadlock(r0=waits_for_ack, r1=WaitStatus(0, MESSAGES, "y", 2, sent={acks_key(0): (5, [])}))


def test_a_closed_rank_is_named():
    assert "rank 2 gave up: why" in deadlock(
        r0=WaitStatus(1, 7, "x"), r1=WaitStatus(2, 7, "y"), r2=WaitStatus(ended="gave up: why")
    )


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_an_invalid_grace_period_is_an_error(monkeypatch, text):
    monkeypatch.setenv(peer_processes.GRACE_VARIABLE, text)
    with pytest.raises(WorldError, match=f"{peer_processes.GRACE_VARIABLE}={text}.*0 or more seconds"):
        peer_processes.grace_from_environment()


def test_a_stopped_process_is_reported_after_the_grace_period(monkeypatch):
    watched = peer_processes.PeerProcesses({1: os.getpid()})
    monkeypatch.setattr(peer_processes.PeerProcesses, "is_stopped", lambda self, rank: True)
    now = [100.0]
    monkeypatch.setattr(peer_processes.time, "monotonic", lambda: now[0])
    assert watched.stopped_reason(1) is None and watched.stopped_reason(2) is None
    now[0] += peer_processes.STOPPED_GRACE_S
    assert f"process {os.getpid()} of rank 1 is stopped (SIGSTOP)" in watched.stopped_reason(1)
    watched.grace_s = float("inf")
    assert watched.stopped_reason(1) is None
    watched.close()


def test_the_environment_names_the_host(monkeypatch):
    monkeypatch.setenv(rendezvous.HOST_VARIABLE, "alpha")
    assert rendezvous.host_name() == "alpha"


def test_missing_ranks_are_named(tmp_path):
    started = time.perf_counter()
    with pytest.raises(WorldError, match=r"rank 1 of 3 .* 1 of 3 ranks came within 0.3 s, ranks \[0, 2\] did not"):
        rendezvous.join_rendezvous(f"file://{tmp_path}/store", 1, 3, None, 0.3)
    assert time.perf_counter() - started < WAIT_TIMEOUT_S


def test_a_rank_that_joins_twice_is_an_error(tmp_path):
    place = f"file://{tmp_path}/store"
    rendezvous.join_rendezvous(place, 0, 1, 4, 5.0)
    with pytest.raises(WorldError, match=r"rank 0 of 1 is twice in generation 4 .* another init_method"):
        rendezvous.join_rendezvous(place, 0, 1, 4, 5.0)
    assert rendezvous.join_rendezvous(place, 0, 1, None, 5.0).generation == 5


def test_ranks_that_torchrun_starts_again_meet_apart_from_the_former_ones():
    """Its store outlives the ranks. Some had ended while they joined, and the number of ranks changes."""
    store = HashStore()
    parts = []
    for world_size in (2, 3, 1, 3):
        with ThreadPoolExecutor(world_size) as ranks:
            calls = [ranks.submit(rendezvous._part_of_this_start, store, r, world_size, 5.0) for r in range(world_size)]
            of_start = [call.result() for call in calls]
        for rank, part in enumerate(of_start):
            assert part.add(f"came/{rank}", 1) == 1
        assert all(part.check([f"came/{rank}" for rank in range(world_size)]) for part in of_start)
        parts += of_start[:1]
        with pytest.raises(WorldError, match=r"rank 1 of 3 under torchrun.*ranks \[0\] did not"):
            rendezvous._part_of_this_start(store, 1, 3, 0.05)
    parts[0].set("late", "")
    assert not any(part.check(["late"]) for part in parts[1:])


def test_a_process_without_a_world_names_its_rank(monkeypatch):
    monkeypatch.setattr(world, "_process_world", None)
    monkeypatch.setattr(world, "_left_world", None)
    with pytest.raises(WorldError, match=r"rebuild\(rank=None, world_size=2\).*needs both numbers"):
        wb.rebuild(world_size=2)


def break_and_rebuild():
    """Rank 1 makes another call; both rebuild with the same init method, and older tensors work in the new world."""
    place = os.environ["WORKBENCH_TEST_RENDEZVOUS"]
    here = wb.init(init_method=place)
    x = wb.tensor(torch.arange(6.0), placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
    module = wb.parallelize(torch.nn.Linear(3, 3), "*: data")
    with pytest.raises(CollectiveAborted, match=r"diverged|lost"):
        x.to_global(sbp="B") if wb.rank() == 0 else wb.barrier()
    with pytest.raises(CollectiveAborted, match="this world has ended"):
        wb.barrier()
    again = wb.rebuild()
    assert again is here and again.generation == 1
    assert x.full_tensor().equal(torch.arange(6.0))
    module(wb.ones(4, 3, placement=x.placement, sbp="S(0)")).sum().backward()
    return again.transport_name


@pytest.mark.procs
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_tensors_and_modules_live_on_in_the_next_world(transport):
    with Ranks(break_and_rebuild, 2, environment={"WORKBENCH_TRANSPORT": transport}, joins=False) as ranks:
        assert ranks.results() == [transport] * 2


def draw_after_a_break(each_has_its_seed):
    """The numbers after a cell that rank 1 did not reach the end of."""
    torch.manual_seed(1234 + wb.rank() * each_has_its_seed)
    drawn = [torch.rand(1).item() for _ in range(2 if wb.rank() else 1)]
    x = wb.zeros(2, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
    with pytest.raises(CollectiveAborted):
        wb.barrier() if wb.rank() == 0 else x.to_global(sbp="B")
    wb.rebuild()
    return drawn, torch.rand(1).item(), torch.initial_seed()


@pytest.mark.procs
def test_ranks_with_seeds_of_their_own_keep_them_when_the_world_is_rebuilt():
    with Ranks(draw_after_a_break, 2, True) as ranks:
        found = ranks.results()
    assert [seed for _, _, seed in found] == [1234, 1235]
    for rank, (drawn, after, _) in enumerate(found):
        generator = torch.Generator().manual_seed(1234 + rank)
        assert [torch.rand(1, generator=generator).item() for _ in range(len(drawn) + 1)] == [*drawn, after]


@pytest.mark.procs
def test_ranks_with_one_seed_draw_the_same_numbers_again_when_the_world_is_rebuilt():
    with Ranks(draw_after_a_break, 2, False) as ranks:
        (_, first, _), (drawn, second, _) = ranks.results()
    assert first == second == drawn[1]


def test_new_ranks_go_on_from_the_others_only_if_these_agree_on_a_seed():
    def state(seed, num_drawn):
        generator = torch.Generator().manual_seed(seed)
        torch.rand(num_drawn, generator=generator)
        return generator.get_state()

    def sources(**seeds):
        known = {int(rank[1:]): state(seed, int(rank[1:])) for rank, seed in seeds.items()}
        return [default_generator.source_of(rank, known) for rank in range(4)]

    assert sources(r0=1) == [0, 0, 0, 0]
    assert sources(r1=7, r2=7, r3=7) == [1, 1, 1, 1]
    assert sources(r0=7, r1=8, r2=7) == [0, 1, 0, 3]
    assert sources(r0=2**64 - 1, r1=0, r2=1, r3=2) == [0, 1, 2, 3]
