"""The memory that an estimate says a rank has at its peak, against what the allocator gave to real ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.allocated import peak_allocated
from benchmarks.gpt import GPT, next_word_loss
from tests.processes import run_processes
from workbench.core.model_costs import ModelCosts
from workbench.core.strategy import Strategy
from workbench.cost.estimate import Estimate, estimate
from workbench.cost.hardware_files import load_hardware
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.runs.job import Job

HERE = replace(load_hardware("h200"), exchanges_on_cores=True)
WORDS = torch.arange(32 * 48).view(32, 48) % 768
IN_TWO = "*: data; blocks.[2-3]: data@1; norm: data@1; head: data@1"
STRATEGIES = (
    "*: data", "*: data | 1x2x1 mb=2", "*: data | 1x2x1 zero=1", "*: data | 1x2x1 zero=2 mb=2",
    "*: data | 1x2x1 zero=3", "*: data | 1x2x1 recompute", "*: model", "*: model:column | 1x1x2",
    f"{IN_TWO} | 2x1x1 mb=4 gpipe", f"{IN_TWO} | 2x1x1 mb=4 1f1b",
)  # fmt: skip
WITHIN = 0.10


def make() -> GPT:
    return GPT(192, 4, 768, 48)


def peaks() -> list[int]:
    job = Job(make, (WORDS, WORDS), next_word_loss, None, 16, 1)
    return [peak_allocated(job, text) for text in STRATEGIES]


@cache
def costs_of_model() -> ModelCosts:
    return layer_costs(make, WORDS[:16], loss_fn=next_word_loss, targets=WORDS[:16])


def predicted(text: str) -> Estimate:
    costs = costs_of_model()
    return estimate(costs, Strategy(text).resolve(costs.layers, 2), HERE, 16, optimizer="momentum")


@pytest.mark.procs
@pytest.mark.slow
def test_peaks_are_those_of_real_ranks() -> None:
    """ZeRO, recomputation, split layers and stages: within 10% each, and without a factor."""
    measured = [max(ranks) for ranks in zip(*run_processes(peaks, 2), strict=True)]
    found = {text: (predicted(text).peak_bytes, size) for text, size in zip(STRATEGIES, measured, strict=True)}
    assert {text: sizes for text, sizes in found.items() if abs(sizes[0] / sizes[1] - 1) > WITHIN} == {}
    assert len({round(size / 1e5) for size in measured}) == len(STRATEGIES), "strategies that hold different amounts"


def test_not_all_gradients_are_there_with_all_activations() -> None:
    """What would be wrong by more than the test above allows: kinds at their own peaks, added up."""
    found = predicted("*: data")
    kinds = found.memory[0]
    whole = kinds["parameters"]
    assert kinds["gradients"] < 0.2 * whole and kinds["activations"] > 2 * whole
    assert found.peak_bytes + whole > (1 + 2 * WITHIN) * found.peak_bytes
