"""Ranks that are killed while they save: the newest complete checkpoint loads, and the losses are those of one run."""

from __future__ import annotations

import os
import random
import time

import pytest

import workbench as wb
from tests.processes import Ranks, run_processes
from tests.training.saving import saving_rounds

WORLDS = [("*: data", 2), ("*: model", 2), ("*: model", 3), ("*: data", 1)]
pytestmark = pytest.mark.procs


def a_round(folder, seed):
    """Start a world, kill one or all of its ranks at a random moment; returns the newest complete step then."""
    chance = random.Random(seed)
    strategy, num_ranks = WORLDS[seed % len(WORLDS)]
    losses = folder / "losses"
    before = losses.stat().st_size if losses.exists() else 0
    with Ranks(saving_rounds.resume, num_ranks, str(folder), strategy, 100_000) as ranks:
        deadline = time.monotonic() + 60
        while (losses.stat().st_size if losses.exists() else 0) == before:
            assert any(process.is_alive() for process in ranks.processes), ranks.results(1)
            assert time.monotonic() < deadline, "no step was made"
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.12))
        victims = ranks.processes if chance.random() < 0.5 else [chance.choice(ranks.processes)]
        for process in victims:
            process.kill()
        for process in ranks.processes:
            process.join(30)
            assert not process.is_alive(), "a rank waits for a dead one"
    return max(wb.checkpoint.Checkpoints(folder).steps(), default=0)


def assert_losses_of_one_run(folder):
    """Every loss that any round has written is the one of the uninterrupted run."""
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    written = [(int(step), float(loss)) for step, loss in lines]
    truth = saving_rounds.train(None, "*: data", 1 + max(step for step, _ in written))
    for step, loss in written:
        assert abs(loss - truth[step]) < 2e-5, (step, loss, truth[step])
    return written


def assert_goes_on_after_kills(folder, seeds):
    """Kill, look, go on; every start is at the newest complete checkpoint. Returns how many kills met a save."""
    newest, left_over = [0], 0
    for seed in seeds:
        newest.append(a_round(folder, seed))
        left_over += bool(wb.checkpoint.Checkpoints(folder).incomplete())
    run_processes(saving_rounds.train, 2, str(folder), "*: data", 2)
    assert [int(line) for line in (folder / "starts").read_text().splitlines()] == newest
    assert_losses_of_one_run(folder)
    return left_over


def test_three_kills(tmp_path):
    assert_goes_on_after_kills(tmp_path / "run", range(3))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_kills(tmp_path):
    left_over = assert_goes_on_after_kills(tmp_path / "run", range(100, 150))
    assert left_over >= 5, "too few kills met a save to say anything"


def test_the_oracle_sees_a_run_that_starts_from_an_old_checkpoint(tmp_path):
    """The same steps from weights of another moment give other losses."""
    saving_rounds.train(str(tmp_path / "run"), "*: data", 3)
    assert_losses_of_one_run(tmp_path / "run")
    newest = wb.checkpoint.Checkpoints(tmp_path / "run").path(3)
    os.rename(wb.checkpoint.Checkpoints(tmp_path / "run").path(2), newest.with_name("old"))
    wb.checkpoint.load(newest)
    with open(tmp_path / "run" / "losses", "a") as file:
        file.write("3 0.5\n")
    with pytest.raises(AssertionError):
        assert_losses_of_one_run(tmp_path / "run")
