"""A part of the zoo, and the judge itself: `make zoo` runs all of it."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo import of_transformers
from tests.zoo.judge import STRATEGIES, Subject, judge
from tests.zoo.model import Model
from tests.zoo.sweep import outcomes

TRIED = 6
"""Models of the sample, a few seconds each."""
CHOSEN = random.Random(28).sample(of_transformers.MOST_USED, TRIED)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_that_nobody_prepared_equals_one_device(name):
    """Under every strategy, without gathering for want of a rule."""
    model = next(model for model in of_transformers.models() if model.name.startswith(f"{name}:"))
    results = {}
    for found in outcomes(model):
        results.update(found)
    assert set(results) == set(STRATEGIES), results
    assert {strategy: result["kind"] for strategy, result in results.items()} == dict.fromkeys(STRATEGIES, "equal"), (
        results
    )
    assert not [result["gathered"] for result in results.values() if result["gathered"]]


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("name", ["funnel:masked_lm", "sew-d:ctc"])
def test_models_that_once_deadlocked_as_pipelines_equal_one_device(name):
    """What blocks box in two steps is there for the next; a function that makes constants has known results."""
    model = next(model for model in of_transformers.models() if model.name == name)
    (result,) = outcomes(model, ["pipeline"])
    assert result["pipeline"]["kind"] == "equal", result


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe", pytest.param("olmoe", marks=pytest.mark.slow)])
def test_fused_experts_spread_over_ranks_equal_one_device(name):
    """With biases and transposed weights; beside a shared expert."""
    model = next(model for model in of_transformers.models() if model.name.startswith(f"{name}:"))
    subject = Subject.of(model)
    outcome = judge(subject, "*: data; *: expert", 2, subject.on_one_device())
    assert (outcome.kind, outcome.gathered) == ("equal", []), outcome


def test_the_judge_finds_a_wrong_number():
    draw = torch.Generator().manual_seed(0)
    batch = (torch.randn(4, 4, generator=draw), torch.randint(0, 2, (4,), generator=draw))
    subject = Subject.of(Model("linear", "here", lambda: (nn.Linear(4, 2), batch), F.cross_entropy))
    truth = subject.on_one_device()
    assert judge(subject, "*: data", 2, truth).kind == "equal"
    with torch.no_grad():
        subject.module.bias[0] += 1e-3
    assert judge(subject, "*: data", 2, truth).kind == "wrong"
