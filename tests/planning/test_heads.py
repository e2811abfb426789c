"""No model degree is proposed that gives ranks parts of heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from workbench.core.model_costs import ModelCosts
from workbench.cost.hardware_files import load_hardware
from workbench.cost.transformer import Transformer, transformer_costs
from workbench.errors import StrategyError
from workbench.planning.candidates import groups
from workbench.planning.problem import Constraints, Problem
from workbench.training.costs.layer_costs import heads_of, layer_costs

ODD = Transformer(hidden=768, heads=6, layers=4, vocab=512, seq=256, kv_heads=3)
"""Its degrees of 2 and 4 divide every width."""


def degrees(costs: ModelCosts, **constraints: int) -> set[int]:
    """Of the model axis, that a search of twelve ranks looks at."""
    problem = Problem(costs, load_hardware("a100-80g-selene"), 12, 12, constraints=Constraints(**constraints))
    return {group.degrees[2] for group in groups(problem)}


def test_model_degrees_divide_heads_and_heads_of_keys() -> None:
    costs = transformer_costs(ODD)
    assert costs.heads == (6, 3)
    assert degrees(costs) == {1, 3}
    assert degrees(replace(costs, heads=())) == {1, 2, 3, 4, 6, 12}
    assert degrees(costs, heads=4) == {1, 2, 4}


def test_a_constraint_on_another_degree_is_infeasible() -> None:
    with pytest.raises(StrategyError, match=r"model=4 cannot be.*model divides the heads of attention, 6 and 3"):
        wb.planner.plan(ODD, "a100-80g-selene", 12, 12, precision="fp16", model=4)


def test_a_context_has_no_more_ranks_than_a_sequence_has_positions() -> None:
    short = replace(ODD, seq=3, has_flash=True)
    assert wb.planner.plan(short, "a100-80g-selene", 12, 12, precision="fp16", context=3).strategy.options.context == 3
    with pytest.raises(StrategyError, match=r"context=4 cannot be.*context is at most 3, the positions of a sequence"):
        wb.planner.plan(short, "a100-80g-selene", 12, 12, precision="fp16", context=4)


def test_why_not_tells_of_parts_of_heads() -> None:
    plan = wb.planner.plan(ODD, "a100-80g-selene", 12, 12, precision="fp16", pipeline=1, micro_batches=1)
    assert plan.why_not("*: data | 1x3x4 fp16").reason != "parts of heads"
    assert "does not divide 6 and 3 heads" in str(plan.why_not("*: model | 1x3x4 fp16"))


class Attention(nn.Module):
    """Nothing but its calls tells how many heads it has: 6, and 2 of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(24, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        q = self.q(x).unflatten(-1, (6, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_heads_are_read_from_calls_of_attention_and_from_configurations() -> None:
    assert layer_costs(Attention(), (2, 5, 24)).heads == (2, 6)
    words = torch.zeros(2, 10, dtype=torch.int64)
    assert layer_costs(lambda: GPT(128, 1, 50, 10), words, loss_fn=next_word_loss, targets=words).heads == (4,)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        assert heads_of(transformers.LlamaForCausalLM(config)) == {2, 6}
