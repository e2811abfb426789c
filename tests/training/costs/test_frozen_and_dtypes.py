"""What frozen weights and weights of other sizes than 32 bits take, against dry runs and against simulated ranks."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from benchmarks.allocated import NUM_STEPS
from benchmarks.gpt import GPT, next_word_loss
from tests.cost.test_boxed_bytes import ONE_SHOT
from tests.training.costs.measured_peaks import peak_of
from tests.training.models import CNN
from workbench.core.options import PRECISIONS
from workbench.core.sharding_plan import ShardingPlan
from workbench.core.strategy import Strategy
from workbench.cost.estimate import Estimate, estimate
from workbench.cost.hardware_files import load_hardware
from workbench.cost.software import WORKBENCH, Software, megatron
from workbench.planning.problem import Problem
from workbench.training.costs.dry_run import dry_run
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.runs.job import Job
from workbench.training.strategies.state import ROOT, describe

H200 = load_hardware("h200")
HERE = replace(H200, exchanges_on_cores=True)
WORDS = torch.arange(32 * 20).view(32, 20) % 512
BATCH, WITHIN = 16, 0.10
FEW_WORDS = WORDS[:BATCH, :4]
"""For recurrent layers, which are counted step by step."""


class WithAdapter(nn.Module):
    """A frozen linear layer beside two small trained matrices (LoRA)."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features, dtype=dtype) / 100)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4, dtype=dtype))

    def forward(self, x):
        added = F.linear(F.linear(x.to(self.down.dtype), self.down), self.up)
        return self.base(x) + added.to(x.dtype)


def gpt() -> nn.Module:
    return GPT(128, 3, 512, 20)


def head_only() -> nn.Module:
    model = gpt().requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def with_adapters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv = WithAdapter(block.qkv, dtype)
    return model


class Tagger(nn.Module):
    """Frozen words, a recurrent layer, which returns several tensors, and a head."""

    def __init__(self, recurrent=nn.LSTM) -> None:
        super().__init__()
        self.words = nn.Embedding.from_pretrained(torch.randn(512, 64))
        self.rnn, self.head = recurrent(64, 32, batch_first=True), nn.Linear(32, 512)

    def forward(self, words):
        return self.head(self.rnn(self.words(words))[0])


class Patches(nn.Module):
    """A container with parameters of its own, of which the first is frozen: the first tensor that enters it is the
    batch.
    """

    def __init__(self, trained: str) -> None:
        super().__init__()
        self.first, self.positions = nn.Parameter(torch.randn(1, 1, 64)), nn.Parameter(torch.randn(1, 21, 64))
        self.words, self.embed, self.fc = nn.Embedding(512, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 512)
        self.requires_grad_(False)
        for name in (trained, "head"):
            part = getattr(self, name)
            part.requires_grad_(True)

    def forward(self, words):
        embedded = self.embed(self.words(words))
        x = torch.cat([self.first.expand(len(words), -1, -1), embedded], 1) + self.positions
        return self.head(F.relu(self.fc(x)))[:, 1:]


MODELS = {
    "head": head_only,
    "16 bits": lambda: gpt().to(torch.bfloat16),
    "head of 16 bits": lambda: head_only().to(torch.bfloat16),
    "adapters": lambda: with_adapters(gpt(), torch.float32),
    "mixed": lambda: with_adapters(gpt().to(torch.bfloat16), torch.float32),
    "64 bits": lambda: gpt().to(torch.float64),
}
IN_TWO = "*: data; blocks.[1-2]: data@1; norm: data@1; head: data@1 | 2x1x1 mb=4 1f1b"


@functools.cache
def costs_of(name: str):
    return layer_costs(MODELS[name], WORDS[:BATCH], loss_fn=next_word_loss, targets=WORDS[:BATCH])


def predicted(
    name: str, text: str, hardware=HERE, optimizer: str = "adamw", software: Software = WORKBENCH
) -> Estimate:
    costs = costs_of(name)
    resolved = Strategy(text).resolve(costs.layers, 2)
    return estimate(costs, resolved, hardware, BATCH, optimizer=optimizer, software=software)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(24)
@pytest.mark.parametrize("text", ["*: data | 1x2x1 zero=1", "*: data | 1x2x1 zero=2 mb=2", "*: data | zero=3", IN_TWO])
@pytest.mark.parametrize("name", MODELS)
def test_as_many_bytes_as_a_dry_run(name, text):
    """Frozen weights have no sums, and activations no gradients before the first trained layer."""
    counted = dry_run(MODELS[name], text, 2, WORDS[:BATCH], WORDS[:BATCH], next_word_loss)
    assert predicted(name, text, ONE_SHOT).boxed_bytes == counted.boxed_bytes


RNN_IN_TWO = "*: data; rnn: data@1; head: data@1 | 2x1x1 mb=4 1f1b"
HEAD_IN_TWO = "*: data; head: data@1 | 2x1x1 mb=2 1f1b"


@pytest.mark.sampled(7)
@pytest.mark.parametrize("text", ["*: data | 1x2x1 zero=1", "*: data | zero=3", RNN_IN_TWO, HEAD_IN_TWO])
@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU])
def test_a_layer_that_returns_several_tensors_has_a_backward_if_one_of_them_has(recurrent, text):
    def make():
        return Tagger(recurrent)

    costs = layer_costs(make, FEW_WORDS, loss_fn=next_word_loss, targets=FEW_WORDS)
    assert [row.has_gradients for row in costs.rows] == [(False, False), (False, True), (True, True)]
    counted = dry_run(make, text, 2, FEW_WORDS, FEW_WORDS, next_word_loss)
    found = estimate(costs, Strategy(text).resolve(costs.layers, 2), ONE_SHOT, BATCH)
    assert found.boxed_bytes == counted.boxed_bytes


def test_a_frozen_layer_that_returns_several_tensors_has_none():
    class Frozen(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.rnn.requires_grad_(False)

    costs = layer_costs(Frozen, FEW_WORDS, loss_fn=next_word_loss, targets=FEW_WORDS)
    assert [row.has_gradients for row in costs.rows] == [(False, False), (False, False), (False, True)]


class Twice(Tagger):
    def forward(self, words):
        once = self.rnn(self.words(words))[0]
        return self.head(self.rnn(torch.cat([once, once], -1))[0])


def test_each_call_of_such_a_layer_has_a_backward():
    costs = layer_costs(Twice, FEW_WORDS, loss_fn=next_word_loss, targets=FEW_WORDS)
    found = [call.row.has_gradients for call in costs.calls if call.row.layer.name == "rnn"]
    assert found == [(False, True), (True, True)]


@pytest.mark.parametrize(
    ("trained", "expected"), [("embed", (True, True)), ("positions", (True, True)), ("head", (False, False))]
)
def test_what_enters_a_container_is_unknown(trained, expected):
    costs = layer_costs(lambda: Patches(trained), WORDS[:BATCH], loss_fn=next_word_loss, targets=WORDS[:BATCH])
    (root,) = (row for row in costs.rows if row.layer.name == ROOT)
    assert root.has_gradients == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["*: data", "*: data | recompute"])
@pytest.mark.parametrize("trained", ["fc2", "conv2", "bn2"])
def test_frozen_batch_norms_sum_their_statistics_in_forward(trained, text):
    """Before the first trained layer they send nothing in backward, and do not run again."""

    def make():
        model = CNN()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model

    batch = torch.ones(16, 1, 8, 8), torch.arange(16) % 10
    costs = layer_costs(make, batch[0], loss_fn=F.cross_entropy, targets=batch[1])
    found = estimate(costs, Strategy(text).resolve(costs.layers, 2), ONE_SHOT, 16)
    assert found.boxed_bytes == dry_run(make, text, 2, *batch, F.cross_entropy).boxed_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["head", "16 bits", "head of 16 bits", "64 bits"])
def test_as_many_bytes_as_a_dry_run_on_a_model_axis(name):
    counted = dry_run(MODELS[name], "*: model", 2, WORDS[:BATCH], WORDS[:BATCH], next_word_loss)
    assert predicted(name, "*: model", ONE_SHOT).boxed_bytes == counted.boxed_bytes


@pytest.mark.parametrize("text", ["*: data | 1x2x1 zero=1", "*: data | 1x2x1 zero=3"])
@pytest.mark.parametrize("name", ["head of 16 bits", "mixed"])
def test_the_panel_s_grid_counts_the_sums_of_trained_weights(name, text):
    """By layer, all ranks together; under ZeRO 3 what is gathered, too, as if backward went through all layers."""
    layers = describe(MODELS[name]())
    plan = ShardingPlan(layers, Strategy(text).resolve(layers, 2))
    found = {each.layer.name: plan.gradient_bytes(each) for each in plan.layers_of()}
    gathered = 4 if text.endswith("3") else 0  # 16 bits, twice
    assert found["words"] == gathered * 512 * 128
    if name == "mixed":
        assert found["blocks.0.qkv"] == (12 if gathered else 8) * 4 * 512
        assert found["head"] == gathered * 512 * 128
    else:
        assert found["head"] == (6 if gathered else 4) * 512 * 128


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_weights_gradients_and_state_have_the_sizes_that_torch_gives_them(name):
    model = MODELS[name]()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
    kinds = predicted(name, "*: data").memory[0]
    assert kinds["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
    assert kinds["optimizer"] == sum(tensor.nbytes for tensor in state)
    assert kinds["gradients"] <= sum(parameter.nbytes for parameter in trained)


def test_state_of_8_bits_counts_by_number():
    one, other = (predicted(name, "*: data", optimizer="adamw8bit").memory[0] for name in ("16 bits", "64 bits"))
    assert one["optimizer"] == pytest.approx(other["optimizer"])
    assert one["parameters"] == other["parameters"] / 4


def test_master_weights_have_the_sizes_of_their_program():
    """Megatron's 2 + 4 + 12 bytes do not depend on the dtype of the traced model; frozen weights are 2 of them."""
    text = "*: data | 1x2x1 bf16"
    kinds = predicted("16 bits", text, software=megatron(2023)).memory[0]
    number = sum(parameter.numel() for parameter in gpt().parameters())
    assert (kinds["parameters"], kinds["gradients"], kinds["optimizer"]) == (2 * number, 4 * number, 12 * number)
    kinds = predicted("head", text, software=megatron(2023)).memory[0]
    assert (kinds["parameters"], kinds["gradients"]) == (2 * number, 4 * 512 * 128)


def measured(name: str, text: str, watched: int) -> int:
    words = WORDS, WORDS
    job = Job(MODELS[name], words, next_word_loss, lambda p: torch.optim.AdamW(p, foreach=False), BATCH, NUM_STEPS)
    return peak_of(job, text, watched)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "text", "watched"),
    [
        ("head", "*: data", 0),
        ("head", IN_TWO, 1),
        ("adapters", "*: data | 1x2x1 mb=2", 0),
        ("adapters", "*: data | 1x2x1 recompute", 0),
        ("mixed", "*: data | zero=3", 0),
        ("mixed", IN_TWO, 1),
        ("16 bits", IN_TWO, 1),
        ("16 bits", "*: model", 0),
    ],
)
def test_peaks_are_those_of_simulated_ranks(name, text, watched):
    peak = max(predicted(name, text).memory, key=lambda kinds: sum(kinds.values()))
    assert sum(peak.values()) == pytest.approx(measured(name, text, watched), rel=WITHIN)


# ---- time -----------------------------------------------------------------------------------------------------------


def test_backward_computes_only_what_trained_weights_need():
    """All frozen but the head: a forward of all, and of the head the product for its weight."""
    whole, part = (predicted(name, "*: data") for name in ("64 bits", "head"))
    flops = {row.layer.name: row.flops for row in costs_of("head").rows}
    assert part.flops_per_sample == sum(flops.values()) + flops["head"]
    assert whole.flops_per_sample == 3 * sum(flops.values())
    frozen, trained = costs_of("head").rows[3], costs_of("head").rows[-1]
    assert (frozen.has_gradients, trained.has_gradients) == ((False, False), (False, True))


def test_without_a_precision_a_model_computes_in_its_own_dtype():
    """The runtime casts nothing: bytes and rate are those of 16 bits, as under the option."""
    own, cast = (predicted("16 bits", f"*: data | 1x2x1{option}", H200) for option in ("", " bf16"))
    assert own.compute_s == cast.compute_s and own.memory == cast.memory
    slower = replace(H200, matmul_flops_per_s={**H200.matmul_flops_per_s, "bf16": 1e9})
    assert predicted("16 bits", "*: data", slower).compute_s > 100 * own.compute_s


def test_autocast_leaves_64_bits_as_they_are():
    found = [predicted("64 bits", f"*: data | 1x2x1 {option}", H200) for option in ("fp32", "bf16")]
    assert found[0] == found[1]


class MeanOfFeatures(nn.Linear):
    """Keeps a moving mean of its features in 32 bits, and mixes them with it, which torch refuses in mixed dtypes."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        return self.mean.lerp(super().forward(x), 0.7)


def test_a_model_that_fails_under_autocast_is_priced_in_32_bits():
    with pytest.warns(UserWarning, match="under autocast to bfloat16 the model fails.*32 bits. RuntimeError: expected"):
        costs = layer_costs(MeanOfFeatures(), (4, 8))
    assert costs.rows[0].own and not costs.autocast
    assert wb.planner.plan(costs, HERE, 2, BATCH).estimate.step_s > 0


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_a_frozen_model_of_16_bits_fits_where_its_weights_do():
    """The user's program: weights of 14 GB and a trained head fit on 8 ranks of 80 GB, and also on one."""
    costs = costs_of("head of 16 bits")
    weights = sum(parameter.nbytes for parameter in MODELS["head of 16 bits"]().parameters())
    problem = Problem(costs, HERE, 1, BATCH, memory_bytes=2 * weights)
    assert not problem.is_infeasible
    assert Problem(costs, HERE, 1, BATCH, memory_bytes=0.9 * weights).is_infeasible
    plan = wb.planner.plan(costs, HERE, 2, BATCH, memory_bytes=2 * weights)
    assert plan.estimate.peak_bytes < 2 * weights
    small = wb.planner.plan(costs, HERE, 2, BATCH, memory_bytes=0.99 * weights)
    assert small.estimate.memory[0]["parameters"] < 0.9 * weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_models_of_any_dtype_have_plans(dtype):
    model = nn.Linear(4, 8, device="meta", dtype=dtype)
    costs = layer_costs(model, torch.zeros(2, 4, dtype=dtype))
    plan = wb.planner.plan(costs, H200, 2, 8)
    assert plan.estimate.memory[0]["parameters"] <= 40 * dtype.itemsize
    is_known = costs.dtype in PRECISIONS
    assert ("priced as fp32" in str(plan)) == (not is_known)
    for text in ("*: data", "*: model | bf16", "best"):
        assert wb.planner.simulate(costs, text, H200, gpus=2, batch_size=8).estimate.step_s > 0


class Quantized(nn.Module):
    """A weight of 8 bits with a scale of 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 32, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(64, 1))

    def forward(self, x):
        return x @ (self.weight * self.scale).t()


def test_a_quantized_model_has_its_bytes():
    costs = layer_costs(nn.Sequential(Quantized(), nn.ReLU(), nn.Linear(64, 4)), (2, 32))
    assert costs.dtype == "fp32"
    resolved = Strategy("*: data").resolve(costs.layers, 2)
    kinds = estimate(costs, resolved, HERE, 8).memory[0]
    assert kinds["parameters"] == 64 * 32 + 4 * (64 + 65 * 4)
    assert kinds["optimizer"] == 8 * (64 + 65 * 4)
