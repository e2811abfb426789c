"""Formulas of transformers against published ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.cost.estimate import estimate
from workbench.cost.hardware_files import load_hardware
from workbench.cost.software import megatron
from workbench.cost.stage_settings import settings_of
from workbench.cost.stages import prices_of, stage_prices
from workbench.cost.transformer import Transformer, transformer_costs, transformer_strategy
from workbench.errors import StrategyError

GPT_22B = Transformer(hidden=6144, heads=64, layers=2, vocab=51200, seq=2048)
GPT_175B = Transformer(hidden=12288, heads=96, layers=2, vocab=51200, seq=2048)


def kept_bytes(model: Transformer, t: int, b: int, sequence: bool, recompute: str) -> float:
    """Activations that a rank keeps of a micro-batch of ``b`` samples."""
    costs = transformer_costs(model)
    strategy = transformer_strategy(model, tensor=t, sequence=sequence, precision="fp16", recompute=recompute != "none")
    software = megatron(2022, recompute if recompute == "selective" else "full")
    (setting,) = settings_of(costs, strategy, load_hardware("a100-80g-selene"), b, software=software)
    prices = prices_of(costs.rows, strategy.layers, (setting,))
    return stage_prices(costs, strategy.layers, prices, [setting])[0].kept_bytes


@pytest.mark.parametrize("model", [GPT_22B, GPT_175B])
@pytest.mark.parametrize(("t", "b"), [(1, 1), (8, 1), (8, 4)])
def test_activations_of_a_layer_are_those_of_the_paper(model: Transformer, t: int, b: int) -> None:
    """Korthikanti et al., arXiv 2205.05198, table 2."""
    s, h, a = model.seq, model.hidden, model.heads
    expected = {
        (False, "none"): s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        (True, "none"): s * b * h / t * (34 + 5 * a * s / h),
        (False, "selective"): s * b * h * (10 + 24 / t),
        (True, "selective"): 34 * s * b * h / t,
        (False, "full"): 2 * s * b * h,
    }
    for (sequence, recompute), size in expected.items():
        two, one = (kept_bytes(replace(model, layers=n), t, b, sequence, recompute) for n in (2, 1))
        found = two - one
        assert found == pytest.approx(size, rel=0.005), (sequence, recompute)


def test_parameters_and_operations_are_those_of_the_paper() -> None:
    """Narayanan et al., arXiv 2104.04473, section 5: of the 145B model, one sample, nothing computed again."""
    h, layers, s, v = 12288, 80, 2048, 51200
    costs = transformer_costs(Transformer(h, 96, layers, v, s))
    assert costs.num_parameters == pytest.approx(
        12 * layers * h * h * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h)), rel=1e-3
    )
    forward = 24 * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert sum(row.flops for row in costs.rows) == pytest.approx(forward, rel=1e-6)


def test_positions_are_whole_on_every_rank_of_the_model_axis() -> None:
    costs = transformer_costs(GPT_22B)
    strategy = transformer_strategy(GPT_22B, tensor=8, precision="fp16")
    (setting,) = settings_of(costs, strategy, load_hardware("a100-80g-selene"), 1, software=megatron(2022))
    embedding = prices_of(costs.rows, strategy.layers, (setting,))[0]
    assert embedding.weights == 51200 * 6144 / 8 + 2048 * 6144


def test_the_last_stage_has_a_copy_of_a_tied_table_where_software_copies_it() -> None:
    costs, hardware = transformer_costs(GPT_22B), load_hardware("a100-80g-selene")
    strategy = transformer_strategy(GPT_22B, pipeline=2, precision="fp16")
    own, sent = (
        estimate(costs, strategy, hardware, 1, software=replace(megatron(2022), copies_tied=copies)).memory[-1]
        for copies in (True, False)
    )
    table = 51200 * 6144
    assert [own[kind] - sent[kind] for kind in ("parameters", "gradients", "optimizer")] == [
        2 * table, 2 * table, 12 * table
    ]  # fmt: skip
    alone = transformer_strategy(GPT_22B, precision="fp16")
    assert (
        estimate(costs, alone, hardware, 1, software=megatron(2022)).memory[0]["parameters"] == 2 * costs.num_parameters
    )


def test_logits_cost_14_bytes_and_8_where_the_loss_is_made_in_place() -> None:
    kept = [
        sum(work.saved_bytes for work in transformer_costs(replace(GPT_22B, has_loss_in_place=in_place)).rows[-1].after)
        for in_place in (False, True)
    ]
    assert kept == [14 * 2048 * 51200, 8 * 2048 * 51200]


def test_grouped_heads_and_gates_have_the_parameters_of_llama() -> None:
    llama = Transformer(8192, 64, 80, 128256, 8192, kv_heads=8, ffn=28672, is_gated=True, has_flash=True)
    assert transformer_costs(llama).num_parameters == pytest.approx(70.55e9, rel=2e-3)


def test_uneven_layers_leave_the_ends_shorter() -> None:
    model = Transformer(64, 4, 10, 100, 16)
    stages = [choice.stage for choice in transformer_strategy(model, pipeline=4).layers if "qkv" in choice.name]
    assert [stages.count(stage) for stage in range(4)] == [2, 3, 3, 2]


@pytest.mark.parametrize(("pipeline", "each", "sizes"), [(16, 1, [0, *[1] * 126, 0]), (8, 2, [1, *[2] * 62, 1])])
def test_embedding_and_loss_may_stand_for_a_layer_of_a_stage(pipeline: int, each: int, sizes: list[int]) -> None:
    """Llama 3.1 405B has 126 layers: arXiv 2407.21783, section 3.3.2, takes a layer of the first and the last stage."""
    strategy = transformer_strategy(Transformer(64, 4, 126, 100, 16), pipeline=pipeline, layers_per_stage=each)
    stages = [choice.stage for choice in strategy.layers if "qkv" in choice.name]
    assert [stages.count(stage) for stage in range(strategy.num_stages)] == sizes


def test_flash_attention_has_the_rate_of_the_machines_own_kernel_from_2024_on() -> None:
    """Four functions of forward and backward: before, each takes as long as a product with 128 as its inner size."""
    model, machine = Transformer(4096, 32, 1, 128, 8192, has_flash=True), load_hardware("h100-sxm-ib")
    strategy = transformer_strategy(model, precision="bf16")
    before, since = (
        estimate(transformer_costs(model), strategy, machine, 1, software=megatron(year)).compute_s
        for year in (2023, 2024)
    )
    operations, rate = 3.5 * 2 * 8192**2 * 4096, machine.matmul_flops_per_s["bf16"]
    of_product = rate * 128 / (128 + machine.matmul_half_size)
    assert before - since == pytest.approx(operations * (1 / of_product - 1 / 387e12), rel=1e-3)
    assert before > since


def test_stages_that_interleave_must_divide() -> None:
    with pytest.raises(StrategyError, match="10 layers in stages of 2 on 4 ranks"):
        transformer_strategy(Transformer(64, 4, 10, 100, 16), pipeline=4, layers_per_stage=2)
