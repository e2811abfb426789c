"""Layer costs of models that nobody here wrote, against what they do and save on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.models import zoo
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.diagnostics.memory import ActivationMeter
from workbench.training.strategies.state import describe

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


NAMES = ["gpt2", "llama", "bert", "vit", "t5"]


# Attention in one call is counted by the same formula whoever makes it.
@pytest.mark.sampled(4, start=1)
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "eager") for name in NAMES),
        ("llama", "sdpa"),
        *(pytest.param(name, "sdpa", marks=pytest.mark.slow) for name in NAMES if name != "llama"),
    ],
)
def test_operations_and_saved_bytes_are_those_of_a_real_run(name: str, attention: str) -> None:
    model, batch = zoo.make(name, attention), zoo.batch_for(name)
    costs = layer_costs(model, batch)
    meter = ActivationMeter(model)
    formulas = {CPU_ATTENTION: lambda q, k, v, *args, out_shape=None, **options: 4 * math.prod(q) * k[-2]}
    with meter.measure(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        output = model(**batch)
    assert round(sum(row.flops for row in costs.rows) * zoo.BATCH) == counter.get_total_flops()
    assert round(sum(row.saved_bytes for row in costs.rows) * zoo.BATCH) == meter.size_bytes
    assert {row.layer.name for row in costs.rows} == {layer.name for layer in describe(model)}
    assert name == "t5" or costs.blocks[0][2] == 2  # the first block of T5 has a layer more
    del output


def test_experts_in_32_bits_are_counted() -> None:
    """On metadata, torch's products by expert are those of bfloat16 only."""
    found = {kind: layer_costs(zoo.make("mixtral"), zoo.batch_for("mixtral"), dtype=kind) for kind in ("fp32", "bf16")}
    flops = [sum(row.flops for row in costs.rows if row.layer.experts) for costs in found.values()]
    assert flops[0] == flops[1] > 0
