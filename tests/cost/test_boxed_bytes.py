"""Bytes that an estimate says are sent, against a dry run: the real program on metadata counts what ranks send."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from tests.training.costs.test_dry_run import perceptron, random_strategy
from tests.training.models import CNN
from workbench.core.model_costs import Extent, LayerCost, ModelCosts, OpCost
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware import Link
from workbench.cost.hardware_files import load_hardware
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.costs.dry_run import dry_run
from workbench.training.costs.layer_costs import layer_costs
from workbench.transport.threads import ThreadTransport

RING = load_hardware("h200")
ONE_SHOT = replace(
    RING,
    links=(Link(1024, ThreadTransport.cost.latency_s, ThreadTransport.cost.bandwidth_bytes_per_s),),
    one_shot_bytes=ThreadTransport.cost.one_shot_bytes,
)
"""As engines of one host make small sums: every rank from all terms."""


class Skips(torch.nn.Module):
    """A residual over three layers, one of what a layer leaves without its activation function, and one over all."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.head = (torch.nn.Linear(12, n) for n in (12, 12, 12, 12, 6))

    def forward(self, x):
        first = self.a(x)
        second = self.b(torch.tanh(first))
        third = self.c(torch.relu(second)) + first
        return self.head(torch.tanh(self.d(third) + second) + torch.tanh(first))


class Translator(torch.nn.Module):
    """An encoder and a decoder of torch: attention to itself, and to the encoder."""

    def __init__(self):
        super().__init__()
        self.words, options = torch.nn.Embedding(48, 32), {"dropout": 0.0, "batch_first": True}
        layer = torch.nn.TransformerEncoderLayer(32, 8, 64, **options)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder, self.head = torch.nn.TransformerDecoderLayer(32, 8, 64, **options), torch.nn.Linear(32, 48)

    def forward(self, words):
        words = self.words(words)
        return self.head(self.decoder(words, self.encoder(words)))


class TiedHead(torch.nn.Module):
    """A table that is the head, too, which has a bias of its own."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = torch.nn.Embedding(48, 32), torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 48)
        self.head.weight = self.words.weight

    def forward(self, words):
        return self.head(torch.tanh(self.fc(self.words(words))))


class SharedBias(torch.nn.Module):
    """As the head of BERT: the weight is the table, and the bias is also that of the module around."""

    def __init__(self):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(48, 32), torch.nn.Module()
        self.head.bias, self.head.decoder = torch.nn.Parameter(torch.zeros(48)), torch.nn.Linear(32, 48)
        self.head.decoder.weight, self.head.decoder.bias = self.words.weight, self.head.bias

    def forward(self, words):
        return self.head.decoder(torch.tanh(self.words(words)))


FLOAT8 = replace(RING, matmul_flops_per_s={**RING.matmul_flops_per_s, "fp8": 1e12})
WORDS = torch.arange(160).view(16, 10) % 48
MODELS = {
    "perceptron": (perceptron, torch.ones(16, 12), torch.arange(16) % 6, F.cross_entropy),
    "gpt": (lambda: GPT(128, 2, 48, 10), WORDS, WORDS, next_word_loss),
    "translator": (Translator, WORDS, WORDS, next_word_loss),
    "a word": (Translator, WORDS[:, :2], WORDS[:, :2], next_word_loss),
    "tied": (TiedHead, WORDS, WORDS, next_word_loss),
    "bert": (SharedBias, WORDS, WORDS, next_word_loss),
    "skips": (Skips, torch.ones(16, 12), torch.arange(16) % 6, F.cross_entropy),
    "cnn": (CNN, torch.ones(16, 1, 8, 8), torch.arange(16) % 10, F.cross_entropy),
}
"""Fewer words in a text than texts in a micro-batch, never as many: else positions look like samples to the runtime."""


@functools.cache
def costs_of(name):
    """What no strategy changes."""
    make, inputs, targets, loss_fn = MODELS[name]
    return layer_costs(make, inputs, loss_fn=loss_fn, targets=targets)


def both(name, text, num_ranks, hardware=RING):
    """(estimated, counted)."""
    make, inputs, targets, loss_fn = MODELS[name]
    costs = costs_of(name)
    resolved = Strategy(text).resolve(costs.layers, num_ranks)
    found = estimate(costs, resolved, hardware, len(inputs), optimizer="momentum")
    run = dry_run(make, text, num_ranks, inputs, targets, loss_fn, cost=hardware.link_cost)
    return found.boxed_bytes, run.boxed_bytes


def assert_same_bytes(name, text, num_ranks, rel=1e-9, hardware=RING):
    estimated, counted = both(name, text, num_ranks, hardware)
    assert estimated == pytest.approx(counted, rel=rel), text


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("seed", "num_ranks"), [(0, 2), (0, 4), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4), (5, 4)])
def test_chains_of_layers_send_what_is_estimated(seed, num_ranks):
    """Any mixture of choices per layer, degrees, stages, micro-batches and ZeRO."""
    assert_same_bytes("perceptron", random_strategy(random.Random(1000 + seed), "perceptron", num_ranks), num_ranks)


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize(("seed", "num_ranks"), [(0, 2), (1, 4), (2, 2), (4, 4)])
def test_chains_of_layers_under_autocast_send_what_is_estimated(seed, num_ranks):
    strategy = Strategy(random_strategy(random.Random(1000 + seed), "perceptron", num_ranks))
    assert_same_bytes("perceptron", str(strategy.with_options(precision="bf16")), num_ranks)


def test_columns_that_become_rows_between_stages():
    assert_same_bytes("perceptron", "0: data@0; 2: model@0; 4: data@1; 6: model@1 | 2x1x2 mb=4 1f1b", 4)


@pytest.mark.parametrize(
    ("text", "num_ranks"),
    [
        ("*: data", 2),
        ("*: data; head: data@1 | 2x1x1 mb=4", 2),
        ("*: data; head: data@1 | 2x2x1 mb=2 bf16", 4),
        ("words: model:row; fc: data; head: model:column@1 | 2x1x2 mb=2", 4),
    ],
)
def test_a_weight_that_two_layers_share_is_summed_once_and_sent_to_another_stage_for_each_micro_batch(text, num_ranks):
    assert_same_bytes("tied", text, num_ranks)


def test_a_bias_of_two_layers_is_summed_once():
    assert costs_of("bert").num_parameters == 48 * 32 + 48
    assert_same_bytes("bert", "*: data", 2)


WIDE = [
    ("0: data; 2: data; 4: data@1; 6: data@1 | 1x1+2x1 mb=2", 3),
    ("0: data; 2: data; 4: data@1; 6: data@1 | 2x1+1x1 mb=2", 3),
    ("0: model; 2: model; 4: data@1; 6: data@1 | 1x2+2x1", 4),
    ("0: data; 2: data; 4: model@1; 6: model@1 | 2x1+1x2 mb=4", 4),
    ("0: data; 2: data; 4: model@1; 6: model@1 | 1x1+2x2 mb=2", 5),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("text", "num_ranks"), WIDE)
def test_stages_of_unlike_widths_send_what_is_estimated(text, num_ranks):
    assert_same_bytes("perceptron", text, num_ranks)


@pytest.mark.parametrize("widths", ["1x1+2x1+1x1", "2x1+1x1+2x1"])
def test_residuals_between_stages_of_unlike_widths_are_those_of_the_samples_of_their_readers(widths):
    text = "a: data; b: data@1; c: data@1; d: data@2; head: data@2"
    assert_same_bytes("skips", f"{text} | {widths} mb=2", 4 if widths.startswith("1") else 5)


IN_TWO = "blocks.1: {kind}@1; norm: {kind}@1; head: {kind}@1"
STRATEGIES = [
    ("gpt", 2, "*: data"),
    ("gpt", 4, "*: data | 1x4x1 zero=1"),
    ("gpt", 2, "*: data | 1x2x1 zero=3 mb=2"),
    ("gpt", 4, "*: data | 1x4x1 zero=3 recompute"),
    ("gpt", 2, "*: model"),
    ("gpt", 4, "*: model | 1x2x2"),
    ("gpt", 4, "*: model | 1x1x4 mb=2"),
    ("gpt", 4, "*: model | 1x1x4 sequence"),
    ("gpt", 4, "*: model | 1x2x2 zero=1 mb=2 sequence recompute"),
    ("gpt", 4, f"*: data; {IN_TWO.format(kind='data')} | 2x2x1 mb=2"),
    ("gpt", 4, f"*: model; {IN_TWO.format(kind='model')} | 2x1x2 mb=4"),
    ("gpt", 4, f"*: model; {IN_TWO.format(kind='model')} | 2x1x2 mb=4 sequence recompute"),
    ("gpt", 8, f"*: model; {IN_TWO.format(kind='model')} | 2x2x2 mb=4 zero=1"),
    ("gpt", 2, "*: data | context=2"),
    ("gpt", 4, "*: data | 1x4x1 context=4 mb=16"),
    ("gpt", 4, "*: data | 1x4x1 context=2 zero=1 mb=2 recompute"),
    ("gpt", 4, "*: data | 1x4x1 zero=3 shards=2 mb=2 recompute"),
    ("gpt", 8, "*: model | 1x4x2 zero=2 shards=2 mb=2"),
    ("gpt", 4, "*: model | 1x2x2 context=2 sequence"),
    ("gpt", 2, "*: model | overlap=3"),
    ("gpt", 4, "*: model | 1x1x4 mb=2 overlap=2 sequence recompute"),
    ("gpt", 4, f"*: model; {IN_TWO.format(kind='model')} | 2x1x2 mb=4 overlap=4"),
    ("translator", 2, "*: model"),
    ("translator", 4, "*: model | 1x2x2 mb=2 zero=3"),
    ("translator", 4, "*: model | 1x1x4 sequence"),
    ("translator", 4, "*: model; decoder: model@1; head: model@1 | 2x1x2 mb=2"),
    ("translator", 4, "*: model | 1x2x2 context=2"),
    ("a word", 4, "*: model | 1x1x4"),
    ("cnn", 2, "*: data"),
    ("cnn", 4, "*: data | 1x4x1 mb=2"),
    ("cnn", 2, "*: model"),
    ("cnn", 4, "*: model | 1x2x2"),
    ("cnn", 2, "*: data; fc1: data@1; fc2: data@1 | 2x1x1 mb=4"),
    ("cnn", 4, "*: data; fc1: model@1; fc2: model@1 | 2x1x2 mb=4"),
]


def slow_unless(is_quick):
    """All strategies; without ``make test-full`` those of which it holds, given their degrees and other words."""
    found = []
    for name, num_ranks, text in STRATEGIES:
        degrees, *words = text.partition(" | ")[2].split() or ["none"]
        marks = [] if is_quick(degrees, words) else [pytest.mark.slow]
        found.append(pytest.param(name, num_ranks, text, marks=marks))
    return pytest.mark.parametrize(("name", "num_ranks", "text"), found)


@pytest.mark.sampled(16)
@slow_unless(lambda degrees, words: True)
def test_usual_strategies_send_what_is_estimated(name, num_ranks, text):
    """Data, model, sequence and pipeline parallelism, ZeRO and recomputation: equal to the byte."""
    assert_same_bytes(name, text, num_ranks)


# Two ranks sum in one step whatever the link is: only axes of four tell a ring from one shot.
@pytest.mark.sampled(12, start=3)
@slow_unless(lambda degrees, words: "4" in degrees)
def test_sums_in_one_step_send_what_is_estimated(name, num_ranks, text):
    assert_same_bytes(name, text, num_ranks, hardware=ONE_SHOT)


# Under autocast other sizes are sent by the same program: a stage's are those of one stage, two tell of all.
@pytest.mark.sampled(16, start=2)
@slow_unless(lambda degrees, words: not degrees.startswith("2x") or "sequence" in words)
def test_autocast_sends_what_products_make_in_16_bits_and_residuals_in_32(name, num_ranks, text):
    """ZeRO 3 brings the weights of products back for backward in 16 bits, batch norms need fewer numbers."""
    assert_same_bytes(name, str(Strategy(text).with_options(precision="bf16")), num_ranks)


@pytest.mark.sampled(48, start=1)
@slow_unless(lambda degrees, words: True)
def test_scales_of_8_bits_add_a_few_bytes(name, num_ranks, text):
    """The largest values are sent as estimated; of recomputed layers, also those outside of blocks count twice."""
    text = text.partition(" overlap")[0]  # which fp8 refuses
    eight, sixteen = (
        both(name, str(Strategy(text).with_options(precision=word)), num_ranks, FLOAT8) for word in ("fp8", "bf16")
    )
    assert eight[0] == pytest.approx(eight[1], abs=96 * num_ranks if "recompute" in text else 1e-6)
    assert eight[1] > sixteen[1] or name == "cnn"


def test_the_linear_layers_of_gpt_2_have_scales_too():
    sent = []
    for kind, weight in (("Linear", (48, 32)), ("Conv1D", (32, 48))):
        product = OpCost("linear", 2.0 * 32 * 48, 4.0 * (32 + 48), 32, 4.0 * 32)
        row = LayerCost(Layer("fc", kind, {"weight": weight}, 32 * 48), (product,), (), Extent((48,)))
        resolved = Strategy("*: data | fp8").resolve([row.layer], 2)
        sent.append(estimate(ModelCosts((row,), (32,)), resolved, FLOAT8, 16).sent.activations)
    assert sent[0] == sent[1] > 0


BORDERS = ["ab|cd|head", "a|bcd|head", "a|b|cdhead", "ab|cdhead", "abc|dhead"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("options", ["data", "data mb=4"])
def test_residuals_over_borders_of_stages_are_sent_once_to_each_stage_that_reads_them(borders, options):
    kind, words = options.split()[0], " ".join(options.split()[1:])
    stages = [stage.replace("head", "h") for stage in borders.split("|")]
    names = {"h": "head"}
    rows = "; ".join(f"{names.get(x, x)}: {kind}@{stage}" for stage, layers in enumerate(stages) for x in layers)
    width = "2x1" if kind == "data" else "1x2"
    assert_same_bytes("skips", f"{rows} | {len(stages)}x{width} {words}", 2 * len(stages))


def frozen_skips(*names):
    model = Skips()
    for name in names:
        getattr(model, name).requires_grad_(False)
    return model


FROZEN = [("a",), ("b",), ("a", "b"), ("a", "b", "c"), ("a", "b", "c", "d"), ("c", "d")]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("borders", [["a", "bcdh"], *(each.replace("head", "h").split("|") for each in BORDERS)])
@pytest.mark.parametrize("names", FROZEN)
def test_residuals_of_frozen_layers_are_sent_without_their_gradients(names, borders):
    make, batch = functools.partial(frozen_skips, *names), (torch.ones(16, 12), torch.arange(16) % 6)
    rows = "; ".join(f"{x.replace('h', 'head')}: data@{stage}" for stage, layers in enumerate(borders) for x in layers)
    costs = layer_costs(make, batch[0], loss_fn=F.cross_entropy, targets=batch[1])
    for degrees in ("1x1 mb=2", "2x1"):
        text, num_ranks = f"{rows} | {len(borders)}x{degrees}", len(borders) * int(degrees[0])
        found = estimate(costs, Strategy(text).resolve(costs.layers, num_ranks), RING, 16, optimizer="momentum")
        run = dry_run(make, text, num_ranks, *batch, F.cross_entropy, cost=RING.link_cost)
        assert found.boxed_bytes == pytest.approx(run.boxed_bytes, rel=1e-9), text


def test_what_frozen_residuals_send_is_what_simulated_ranks_send():
    inputs, targets = torch.ones(16, 12), torch.arange(16) % 6
    text = "*: data; b: data@1; c: data@1; d: data@1; head: data@1 | 2x1x1"

    state = Skips().state_dict()

    def program():
        model = frozen_skips("a")
        model.load_state_dict(state)
        model = wb.parallelize(model, text)
        current().traffic.reset()
        wb.forward_backward(model, F.cross_entropy, inputs, targets)
        return current().traffic.sent_bytes

    costs = layer_costs(lambda: frozen_skips("a"), inputs, loss_fn=F.cross_entropy, targets=targets)
    found = estimate(costs, Strategy(text).resolve(costs.layers, 2), RING, 16)
    sent = run_ranks(program, 2)
    assert found.boxed_bytes == sum(sent) == 3 * 12 * 4 * 16
    assert sent[1] == 0


def test_half_of_the_bytes_would_be_seen():
    """What programs do that keep everything in 16 bits: no autocast has been counted then."""
    costs, inputs = costs_of("gpt"), MODELS["gpt"][1]
    resolved = Strategy("*: model | 1x1x4 sequence bf16").resolve(costs.layers, 4)
    found, halved = (
        estimate(model, resolved, RING, len(inputs), optimizer="momentum").boxed_bytes
        for model in (costs, replace(costs, autocast=()))
    )
    assert halved < 0.7 * found


def test_a_wrong_estimate_is_seen():
    assert both("perceptron", "*: model", 2)[0] != pytest.approx(both("perceptron", "*: data", 2)[1])
