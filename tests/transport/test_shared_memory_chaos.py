"""Random programs over shared memory with one random fault: the right results, or an error that says why, and soon."""

import random
import time

import pytest
import torch

from tests.transport.shared_ranks import run_shared
from workbench.errors import CollectiveAborted

NUM_CALLS = 10
FAULTS = ["none", "late", "other header", "skipped call", "extra call", "abort", "own error"]
ROUNDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 200))]


class OwnError(Exception):
    """A mistake in the program of one rank."""


def calls_of(chance, num_ranks):
    """Kind, group and size of each call; equal on all ranks."""
    kinds = [chance.choice(["sum", "ring", "gather"]) for _ in range(NUM_CALLS)]
    return [
        (kind, chance.sample(range(num_ranks), chance.randint(2, num_ranks)), chance.choice([0, 1, 50, 90_000]))
        for kind in kinds
    ]


def perform(transport, rank, number, call, header):
    """One call; asserts that the result is right."""
    kind, group, numel = call
    ones = torch.full((numel,), rank + 1.0)
    if kind == "gather":
        assert [int(part) for part in transport.all_gather(torch.tensor(rank), header)] == list(
            range(transport.world_size)
        )
    elif rank not in group:
        return
    elif kind == "sum":
        assert transport.all_reduce(ones, group, "sum", number, header).eq(sum(group) + len(group)).all()
    else:
        index = group.index(rank)
        before, after = group[index - 1], group[(index + 1) % len(group)]
        out = torch.empty(numel)
        transport.exchange([(after, ones)], [(before, out)], number, header)
        assert out.eq(before + 1).all()


@pytest.mark.parametrize("seed", ROUNDS)
def test_a_random_fault_ends_every_wait(seed):
    chance = random.Random(seed)
    num_ranks, fault = chance.randint(2, 4), FAULTS[seed % len(FAULTS)]
    calls, victim, moment = calls_of(chance, num_ranks), chance.randrange(num_ranks), chance.randrange(NUM_CALLS)

    def program(transport, rank):
        started = time.perf_counter()
        try:
            for number, call in enumerate(calls):
                header = f"call {number}, {call[0]}"
                if rank == victim and number == moment:
                    if fault == "late":
                        time.sleep(0.2)
                    elif fault == "other header":
                        header = "another call"
                    elif fault == "skipped call":
                        continue
                    elif fault == "extra call":
                        perform(transport, rank, 1000, ("gather", [], 0), "an extra call")
                    elif fault == "abort":
                        transport.abort("by the test")
                    elif fault == "own error":
                        raise OwnError
                perform(transport, rank, number, call, header)
        except (CollectiveAborted, OwnError) as error:
            return error, time.perf_counter() - started
        return "right", time.perf_counter() - started

    results = run_shared(program, num_ranks)
    assert all(isinstance(result, tuple) for result in results), results  # in particular no result was wrong
    assert max(time_s for _, time_s in results) < 2  # usually 0.1; the timeout is 20
    if fault in ("none", "late"):
        assert [outcome for outcome, _ in results] == ["right"] * num_ranks
    elif fault == "abort":
        assert all("by the test" in str(outcome) for outcome, _ in results if outcome != "right")
