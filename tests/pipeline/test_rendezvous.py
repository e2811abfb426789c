"""Action tables under NCCL's rules, played without it.

A communicator runs the sends and receives of a rank in the order in which the rank has made them, and a send ends
together with its receive. The first call on a communicator holds both ranks until both have made it. A rank waits for
its receives, never for its sends.
"""

import pytest

from workbench.pipeline.schedules import GENERATORS, make_table

FORWARD, BACKWARD = "activation", "gradient"


def calls_of(table, num_stages):
    """By rank, the calls ("send" or "receive", source, destination, what) of its actions, in order."""
    rank_of = [stage % len(table) for stage in range(num_stages)]
    calls = [[] for _ in table]
    for rank, actions in enumerate(table):
        for action in actions:
            if action.kind == "W":
                continue
            step, what = (1, FORWARD) if action.kind == "F" else (-1, BACKWARD)
            before, after = action.stage - step, action.stage + step
            if 0 <= before < num_stages and rank_of[before] != rank:
                calls[rank].append(("receive", rank_of[before], rank, (what, action.stage, action.micro_batch)))
            if 0 <= after < num_stages and rank_of[after] != rank:
                calls[rank].append(("send", rank, rank_of[after], (what, after, action.micro_batch)))
    return calls


def play(calls, communicator_of):
    """The ranks that are stuck in the end, with the calls at which they wait. Empty if all calls come to their end."""
    queues = [{} for _ in calls]  # by rank and communicator, the calls that have been made and have not ended
    made, waits, opened = [0] * len(calls), [None] * len(calls), set()
    moves = True
    while moves:
        moves = False
        for rank, own in enumerate(calls):
            while waits[rank] is None and made[rank] < len(own):
                call = own[made[rank]]
                communicator = communicator_of(call)
                queues[rank].setdefault(communicator, []).append(call)
                made[rank] += 1
                moves = True
                if call[0] == "receive" or (rank, communicator) not in opened:
                    waits[rank] = call
                opened.add((rank, communicator))
        for rank, own in enumerate(queues):
            for communicator, queue in own.items():
                kind, source, destination, what = queue[0] if queue else ("", 0, 0, None)
                theirs = queues[destination].get(communicator) if kind == "send" else None
                if theirs and theirs[0] == ("receive", source, destination, what):
                    for place, ended in ((rank, queue), (destination, theirs)):
                        call = ended.pop(0)
                        waits[place] = None if waits[place] == call else waits[place]
                    moves = True
    return {
        rank: waits[rank] or "an open send" for rank in range(len(calls)) if waits[rank] or any(queues[rank].values())
    }


def one_for_all(call):
    """One communicator of all ranks."""
    return "all"


def one_for_a_pair(call):
    """One communicator for both directions of two ranks."""
    return tuple(sorted(call[1:3]))


def one_for_an_ordered_pair(call):
    """One communicator for each direction of two ranks."""
    return call[1:3]


@pytest.mark.parametrize("num_micro_batches", [1, 3, 8, 16])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("schedule", GENERATORS)
def test_every_schedule_ends_with_a_communicator_for_each_ordered_pair(schedule, num_ranks, num_micro_batches):
    for stages_per_rank in (1, 2, 3) if schedule == "interleaved" else (1,):
        num_stages = stages_per_rank * num_ranks
        table = make_table(schedule, num_stages, num_micro_batches, num_ranks)
        assert play(calls_of(table, num_stages), one_for_an_ordered_pair) == {}


@pytest.mark.parametrize("communicator_of", [one_for_all, one_for_a_pair])
def test_with_fewer_communicators_1f1b_stalls(communicator_of):
    table = make_table("1f1b", 4, 8)
    assert play(calls_of(table, 4), communicator_of) != {}
    assert play(calls_of(table, 4), one_for_an_ordered_pair) == {}
