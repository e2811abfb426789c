"""Runs with several seeds: which belong together, their means and spreads, and what is no list of seeds."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from workbench.core.metrics import RunRecord
from workbench.core.seeds import groups, over_seeds, repeats_of, seeds_of, with_seed, without_seed
from workbench.core.verdict import Verdict
from workbench.errors import RunError


def run(seed: int = 0, name: str = "data", **changes: object) -> RunRecord:
    """A run of two steps whose loss and speed depend on the seed."""
    settings = {"seed": seed, "steps": 2, "model": "mlp", "check_steps": 20}
    values: dict[str, object] = {
        "losses": (2.0, 1.0 + seed / 10), "step_times_s": (0.5, 0.25), "samples_per_s": 100.0 + seed,
        "speedup": 1.5 + seed, "peak_memory_bytes": (5 + seed, 7), "boxed_bytes_per_step": 64, "equal": True,
        "loss_difference": 1e-7 * (1 + seed), "verdict": Verdict(True, text=f"of {seed}"), "run_id": f"r{seed}{name}",
        "layer_forward_s": {"fc": 1.0 + seed}, "settings": settings,
    }  # fmt: skip
    return RunRecord(with_seed(name, seed, 0), f"*: {name}", 2, 8, **(values | changes))  # type: ignore[arg-type]


def test_the_mean_and_the_standard_deviation_of_a_sample():
    (mean,) = over_seeds([run(0), run(1), run(5)])
    assert mean.name == "data" and mean.settings["seeds"] == [0, 1, 5] and mean.run_id == "r0data"
    rates, finals = [100.0, 101.0, 105.0], [1.0, 1.1, 1.5]
    assert mean.samples_per_s == pytest.approx(statistics.mean(rates))
    assert mean.spread["samples_per_s"] == pytest.approx(statistics.stdev(rates))
    assert mean.final_loss == pytest.approx(statistics.mean(finals)) == mean.losses[-1]
    assert mean.spread["final_loss"] == pytest.approx(statistics.stdev(finals))
    assert mean.speedup == 3.5 and mean.spread["speedup"] == pytest.approx(statistics.stdev([1.5, 2.5, 6.5]))
    assert mean.rank_seconds == 2 * 0.75 and mean.spread["rank_seconds"] == 0
    assert mean.peak_memory_bytes == (10, 7), "the largest of each rank"
    assert mean.loss_difference == 6e-7 and mean.layer_forward_s == {"fc": 3.0} and mean.equal


def test_one_wrong_seed_is_a_wrong_strategy():
    wrong = run(1, equal=False, verdict=Verdict(False, text="the loss differs"))
    unknown = run(2, equal=None, verdict=Verdict(None, text="stopped"))
    (mean,) = over_seeds([run(0), wrong, unknown])
    assert mean.equal is False and mean.verdict.text == "seed 1: the loss differs"
    (mean,) = over_seeds([run(0), unknown])
    assert mean.equal is None and mean.verdict.text == "seed 2: stopped"


def test_only_runs_that_differ_in_their_seed_are_together():
    apart = [
        run(1, name="model"),
        run(1, settings={"seed": 1, "steps": 3, "model": "mlp"}),
        run(1, settings={"seed": 1, "steps": 2, "model": "other"}),
        run(1, losses=(2.0,), step_times_s=(0.5,)),  # stopped
        run(1, error="rank 1 died"),
        run(1, changes=((1, "*: model"),)),
        run(1, settings={}),
        replace(run(1), num_ranks=4),
        replace(run(1), batch_size=16),
        run(0, run_id="again"),  # the same seed
    ]
    for other in apart:
        assert over_seeds([run(0), other]) == [run(0), other], other
    unchecked = run(1, settings={"seed": 1, "steps": 2, "model": "mlp", "check_steps": 0})
    assert len(over_seeds([run(0), unchecked])) == 1, "a check changes no number"


def test_groups_keep_the_order_and_take_each_seed_once():
    found = groups([run(0), run(0, "model"), run(1, "model"), run(1), run(0), run(1), run(2)])
    assert [[one.name for one in group] for group in found] == [
        ["data", "data, seed 1", "data, seed 2"], ["model", "model, seed 1"], ["data", "data, seed 1"],
    ]  # fmt: skip
    means = over_seeds([run(0), run(1)])
    assert over_seeds(means) == means


def test_repeats_differ_in_their_seed_whatever_their_names_and_ends_are():
    there = [run(0), run(1), replace(run(2), name="mine"), run(3, error="rank 1 died"), run(4, losses=(2.0,))]
    others = [run(5, "model"), replace(run(6), num_ranks=4), run(7, settings={"seed": 7, "steps": 3})]
    assert repeats_of(run(0), [*there, *others]) == there


@pytest.mark.parametrize("last", [math.nan, math.inf, 1e300])
def test_losses_that_break_have_a_mean_and_a_spread_all_the_same(last: float):
    (mean,) = over_seeds([run(0, losses=(2.0, last)), run(1)])
    assert mean.losses[0] == 2.0 and not mean.losses[1] < 1e299 and not mean.spread["final_loss"] < 1e299


def test_a_final_loss_is_that_of_the_last_planned_step():
    assert run().final_loss == 1.0 and run(losses=(2.0,)).final_loss is None and run(losses=()).final_loss is None
    assert run(error="died").final_loss is None and run(settings={}).final_loss == 1.0
    assert run(step_times_s=()).rank_seconds is None


def test_means_survive_json():
    (mean,) = over_seeds([run(0), run(1)])
    again = RunRecord.from_dict(mean.to_dict())
    assert again.spread == mean.spread and over_seeds([again, run(2)]) == [again, run(2)]


def test_names():
    assert without_seed(run(3)) == "data" and without_seed(run(0)) == "data"
    assert without_seed(replace(run(3), name="mine")) == "mine"


def test_which_seeds_are_meant():
    assert list(seeds_of(5, 3)) == [5, 6, 7] and list(seeds_of(0, range(2))) == [0, 1]
    assert seeds_of(0, iter([9, 3])) == [9, 3] and list(seeds_of(-1, 1)) == [-1]


@pytest.mark.parametrize(
    ("seed", "seeds", "words"),
    [
        (0, 0, r"seeds=0: at least 1 run of each strategy\. Give how many, seeds=3, or which"),
        (0, -2, "seeds=-2: at least 1"),
        (0, "3", r"seeds='3': whole numbers, at least 1\. Give how many"),
        (0, [], r"seeds=\[\]: whole numbers, at least 1"),
        (0, [1, "2"], r"where '2' is none"),
        (0, [0, 1.5], "where 1.5 is none"),
        (0, True, "seeds=True: whole numbers"),
        (0, None, "seeds=None: whole numbers"),
        (0, {0: 1}, "whole numbers"),
        (0, [4, 7, 4], "3 seeds, but 4 stands there twice"),
        (3, [1, 2], r"seed=3 beside seeds=\[1, 2\]"),
        ("data", 1, "seed='data': a whole number"),
    ],
)
def test_what_is_no_list_of_seeds(seed: object, seeds: object, words: str):
    with pytest.raises(RunError, match=words):
        seeds_of(seed, seeds)  # type: ignore[arg-type]
