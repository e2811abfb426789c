"""After a fault of one rank, every other rank soon has the right result or the right error, and continues."""

import os
import threading
import time

import pytest

from tests.transport.chaos import HARMLESS, TIMEOUT_S, Chaos, Round, added_resources, open_resources

pytestmark = [pytest.mark.procs, pytest.mark.timed]
WORLDS = {
    "shared": [{}] * 3,
    "gloo": [{"WORKBENCH_TRANSPORT": "gloo"}] * 3,
    "ipc": [{"WORKBENCH_TRANSPORT": "ipc", "WORKBENCH_TEST_LATE_DEVICE": "1"}] * 3,
    "mixed": [{"WORKBENCH_HOST": host} for host in ("alpha", "alpha", "beta", "beta")],
}
"""Environments by rank. Only ranks of the same host see a stopped process, so no rank is alone on its host."""
SOON_S = 2.0


def right_reason(round_, chaos, text):
    """Whether the error of a rank without a fault names the fate of the victim, or its call."""
    victim = f"rank {round_.victim}"
    wanted = {
        "killed": [f"of {victim} has ended", f"lost {victim} in", "lost one of ranks"],  # seen from another host
        "stopped": [f"of {victim} is stopped (SIGSTOP)"],
        "raises": [f"{victim} gave up: OwnError in its program"],
        "interrupted": [f"{victim} gave up: KeyboardInterrupt"],
        "aborted": ["the test said so"],
    }.get(round_.fault.removesuffix(" soon"), ["diverged"])
    return any(words in text for words in wanted)


def check(round_, answers, chaos):
    """Assert that the round ended as expected; returns whether the world must be rebuilt."""
    harmless = round_.fault in HARMLESS
    for rank, (how, text, time_s) in answers.items():
        context = f"{round_}: rank {rank} ended {how} after {time_s:.2f} s: {text}"
        assert time_s < SOON_S, context
        if harmless:
            assert how == "right", context
        elif how == "aborted" and rank != round_.victim:
            assert right_reason(round_, chaos, text), context
            assert " in " in text or " called " in text or "has ended" in text, context  # which call
    # A call that one rank has left out or added may hurt nobody yet, but the ranks count their calls.
    return not harmless


def assert_every_round_ends_right(tmp_path, transport, seeds):
    left_before = set(os.listdir("/dev/shm"))
    num_ranks = len(WORLDS[transport])
    with Chaos(tmp_path, num_ranks, WORLDS[transport]) as chaos:
        assert chaos.rebuild() == [transport] * num_ranks
        assert chaos.rebuild() == [transport] * num_ranks
        pids = [process.pid for process in chaos.processes]
        first = chaos.ask("open_resources")
        for seed in seeds:
            round_ = Round.drawn(seed, num_ranks)
            if check(round_, chaos.play(round_), chaos):
                assert chaos.rebuild() == [transport] * num_ranks
            calm = Round(seed, "none", 0, 0)
            assert {how for how, _, _ in chaos.play(calm).values()} == {"right"}, round_
        assert_nothing_grew(chaos, pids, first)
    assert set(os.listdir("/dev/shm")) <= left_before


def assert_nothing_grew(chaos, pids, first):
    """Processes that lived through all rounds have no more files, threads and mappings open than at the start."""
    assert chaos.rebuild()
    until = time.monotonic() + TIMEOUT_S + 5.0
    while True:
        last = chaos.ask("open_resources")
        more = {
            rank: found
            for rank, process in enumerate(chaos.processes)
            if process.pid == pids[rank] and (found := added_resources(first[rank], last[rank]))
        }
        if not more:
            return
        assert time.monotonic() < until, f"by rank, there is more of {more}"
        time.sleep(0.1)


QUICK = {"shared": range(2, 12), "gloo": (3, 4, 7, 9, 11), "ipc": (3, 8, 10), "mixed": (2, 10, 12)}
"""Seeds; the number of a fault is the seed modulo their number."""


SELDOM = {"gloo", "ipc", "mixed"}
"""Half a minute of the quick tests; the long runs have them as well."""


@pytest.mark.parametrize("transport", [pytest.param(t, marks=[pytest.mark.slow] * (t in SELDOM)) for t in WORLDS])
def test_a_fault_ends_in_the_right_error_and_the_next_exchange_works(tmp_path, transport):
    assert_every_round_ends_right(tmp_path, transport, QUICK[transport])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", WORLDS)
def test_two_hundred_faults(tmp_path, transport):
    assert_every_round_ends_right(tmp_path, transport, range(200))


def test_open_resources_of_a_process_are_detected():
    before, over = open_resources(None, 0, 1), threading.Event()
    left = [threading.Thread(target=over.wait, name="workbench-left") for _ in range(3)]
    for thread in left:
        thread.start()
    with open(os.devnull):
        after = open_resources(None, 0, 1)
    over.set()
    for thread in left:
        thread.join()
    more = added_resources(before, after)
    assert more["doubled threads"] == {"workbench-left": 2} and more["files"] == {os.devnull: 1}
