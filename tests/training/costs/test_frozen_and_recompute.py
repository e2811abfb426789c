"""Recomputation with frozen weights: a block without a backward never runs again, any other one as a whole."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.allocated import NUM_STEPS
from benchmarks.gpt import GPT, next_word_loss
from tests.cost.test_boxed_bytes import ONE_SHOT
from tests.training.costs.measured_peaks import peak_of
from workbench.core.strategy import Strategy
from workbench.cost.estimate import Estimate, estimate
from workbench.cost.hardware_files import load_hardware
from workbench.cost.stages import rows_again
from workbench.planning.candidates import candidates
from workbench.planning.chooser import FAST, Chooser
from workbench.planning.incumbents import Incumbents
from workbench.planning.problem import Constraints, Problem
from workbench.training.costs.dry_run import dry_run
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.runs.job import Job

HERE = replace(load_hardware("h200"), exchanges_on_cores=True)
WORDS = torch.arange(32 * 20).view(32, 20) % 512
BATCH = 16


def gpt_with(*trained: str, width: int = 128) -> nn.Module:
    """A GPT of which parameters train whose names have one of these texts."""
    model = GPT(width, 3, 512, 20)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(text in name for text in trained))
    return model


def chain(*trained: int) -> nn.Module:
    """A chain without blocks, whose layers run again one by one."""
    layers = nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 512)
    model = nn.Sequential(nn.Embedding(512, 128), *layers)
    for number, part in enumerate(model):
        part.requires_grad_(number in trained)
    return model


MODELS = {
    "head": lambda: gpt_with("head"),
    "fc2": lambda: gpt_with("fc2"),
    "last block": lambda: gpt_with("blocks.2.fc2", "head"),
    "all": lambda: gpt_with(""),
    "chain": lambda: chain(3, 5),
}
RAN_AGAIN = {"head": 0, "fc2": 3, "last block": 1, "all": 3}


@functools.cache
def costs_of(name: str):
    return layer_costs(MODELS[name], WORDS[:BATCH], loss_fn=next_word_loss, targets=WORDS[:BATCH])


def predicted(name: str, text: str, hardware=HERE) -> Estimate:
    costs = costs_of(name)
    return estimate(costs, Strategy(text).resolve(costs.layers, 2), hardware, BATCH)


@pytest.mark.parametrize("name", RAN_AGAIN)
def test_blocks_run_again_as_a_whole_or_not_at_all(name):
    """Seconds of forward of so many blocks, the same as of a model that is trained as a whole."""
    whole = predicted("all", "*: data | recompute").compute_s - predicted("all", "*: data").compute_s
    added = predicted(name, "*: data | recompute").compute_s - predicted(name, "*: data").compute_s
    assert added == pytest.approx(RAN_AGAIN[name] / 3 * whole, abs=1e-12)
    blocks, are_alone = rows_again(costs_of(name))
    assert len({block for block in blocks if block >= 0}) == RAN_AGAIN[name] and not are_alone


def test_layers_of_a_chain_run_again_from_the_first_trained_one_on():
    """Words, a frozen layer, two trained ones."""
    plain, again = (predicted("chain", f"*: data{option}").compute_s for option in ("", " | recompute"))
    one_by_one = predicted("chain", "*: data | 1x2x1 recompute=4").compute_s
    assert plain < again == one_by_one
    assert rows_again(costs_of("chain")) == ([-1, -2, -3, -4], True)
    assert rows_again(costs_of("chain"), "4") == ([-1, -2, 2, 3], False)


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    "text",
    [
        "*: model | recompute",
        "*: model | recompute=attention",
        "*: model | 1x1x2 recompute=2",
        "*: data | zero=3 recompute",
        "*: data; blocks.[1-2]: data@1; norm: data@1; head: data@1 | 2x1x1 mb=4 1f1b recompute",
    ],
)
@pytest.mark.parametrize("name", RAN_AGAIN)
def test_as_many_bytes_as_a_dry_run(name, text):
    counted = dry_run(MODELS[name], text, 2, WORDS[:BATCH], WORDS[:BATCH], next_word_loss)
    assert predicted(name, text, ONE_SHOT).boxed_bytes == counted.boxed_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["head", "fc2"])
def test_large_blocks_gather_the_weights_of_what_runs_again(name):
    """ZeRO 3 gathers blocks of this size layer by layer."""
    make = functools.partial(gpt_with, name, width=512)
    costs = layer_costs(make, WORDS[:BATCH], loss_fn=next_word_loss, targets=WORDS[:BATCH])
    text = "*: data | zero=3 recompute"
    found = estimate(costs, Strategy(text).resolve(costs.layers, 2), ONE_SHOT, BATCH)
    assert found.boxed_bytes == dry_run(make, text, 2, WORDS[:BATCH], WORDS[:BATCH], next_word_loss).boxed_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("head", "*: data | recompute"),
        ("fc2", "*: data | recompute=cheap"),
        ("chain", "*: data | recompute=attention"),
    ],
)
def test_peaks_are_those_of_simulated_ranks(name, text):
    peak = max(predicted(name, text).memory, key=lambda kinds: sum(kinds.values()))
    words = WORDS, WORDS
    job = Job(MODELS[name], words, next_word_loss, lambda p: torch.optim.AdamW(p, foreach=False), BATCH, NUM_STEPS)
    assert sum(peak.values()) == pytest.approx(peak_of(job, text, 0), rel=0.10)


@pytest.mark.parametrize("name", MODELS)
def test_seconds_of_layers_are_a_lower_bound_of_the_stage(name):
    """On a model axis, where a block that runs again repeats its exchanges."""
    limits = Constraints(model=2, recompute=True, layers="*: model")
    problem = Problem(costs_of(name), load_hardware("h200"), 2, BATCH, constraints=limits)
    incumbents = Incumbents(problem)
    chooser = Chooser(problem, incumbents)
    for candidate in candidates(problem):
        prices, choices = incumbents.prices(candidate), chooser.choices(candidate, FAST)
        strategy = problem.resolve(choices, [0] * len(problem.rows), candidate.options)
        (stage,) = prices.of_strategy(candidate, strategy)
        whole = stage.forward_s + stage.input_s + stage.weight_s
        assert chooser.seconds(prices, "full") <= whole * (1 + 1e-9), candidate
