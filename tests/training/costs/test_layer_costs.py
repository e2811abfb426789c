"""What layers cost, counted on fake tensors: as many operations and saved bytes as a real run on the CPU has."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpt import GPT, next_word_loss
from tests.training.strategies.mixtures import Pool
from workbench.core.layer_extents import traced
from workbench.core.model_costs import LayerCost, ModelCosts, find_blocks
from workbench.core.rows import Layer
from workbench.errors import StrategyError
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.diagnostics.memory import ActivationMeter
from workbench.training.precision import compute_in
from workbench.training.strategies.state import describe

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Attention(nn.Module):
    """A block whose layers are called in another order than they are listed, with a kernel between them."""

    def __init__(self, width: int = 16, num_heads: int = 4) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.num_heads = num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class TiedWords(nn.Module):
    """The table of words is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


Case = tuple[Callable[[], nn.Module], torch.Tensor]
CASES: dict[str, Case] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU()),
        torch.randn(6, 8),
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        torch.randn(6, 1, 8, 8),
    ),
    "attention": (Attention, torch.randn(3, 5, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(3, 5, 16)),
    "tied words": (TiedWords, torch.randint(20, (3, 7))),
}


def real_run(make: Callable[[], nn.Module], inputs: torch.Tensor) -> tuple[int, int]:
    """(floating point operations, saved bytes) of a forward on the CPU, by torch's counter and the activation meter."""
    model = make()
    meter = ActivationMeter(model)
    formulas = {CPU_ATTENTION: lambda q, k, v, *args, out_shape=None, **options: 4 * math.prod(q) * k[-2]}
    with meter.measure(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        output = model(inputs)
        loss = mean_square(output, torch.zeros_like(output))
        del loss
    return counter.get_total_flops(), meter.size_bytes


def fake_run(make: Callable[[], nn.Module] | nn.Module, inputs: torch.Tensor) -> ModelCosts:
    def loss_fn(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return mean_square(output, torch.zeros_like(output))

    return layer_costs(make, inputs, loss_fn=loss_fn, targets=inputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_operations_and_saved_bytes_are_those_of_a_real_run(name: str) -> None:
    make, inputs = CASES[name]
    costs = fake_run(make, inputs)
    flops = round(sum(row.flops for row in costs.rows) * len(inputs))
    saved = round(sum(row.saved_bytes for row in costs.rows) * len(inputs))
    assert (flops, saved) == real_run(make, inputs)


def test_an_lstm_does_four_thirds_of_the_work_of_a_gru() -> None:
    """torch computes it by one function of the CPU, of which its counter knows nothing."""
    works, num_words = {}, 2
    for kind in (nn.LSTM, nn.GRU):
        costs = layer_costs(lambda kind=kind: kind(16, 32, 2, batch_first=True, bidirectional=True), (2, num_words, 16))
        works[kind] = costs.rows[0].flops, costs.rows[0].saved_bytes
    layers = [16 * 32 + 32 * 32, 64 * 32 + 32 * 32]
    assert works[nn.LSTM][0] == pytest.approx(4 / 3 * works[nn.GRU][0]) == num_words * 2 * 2 * 4 * sum(layers)
    assert works[nn.LSTM][1] > num_words * 2 * 2 * 4 * 32 * 4  # four gates of every word


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(self.out(x), x)


def test_products_that_torchs_counter_leaves_out() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.vector = nn.Bilinear(3, 5, 7), nn.Parameter(torch.randn(7))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            pair = self.pair(x, y)
            return pair @ self.vector + torch.cdist(x[:, None], y[:, None, :3]).flatten()

    rows = layer_costs(Products, [torch.randn(4, 3), torch.randn(4, 5)]).rows
    assert [row.flops for row in rows] == [2 * 3 * 5 * 7, 2 * 7 + 2 * 3]
    many = layer_costs(lambda: Distances(), torch.randn(2, 40, 8)).rows
    assert sum(row.flops for row in many) == 2 * 40 * 40 * 8 + 2 * 40 * 8 * 8


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["mask", "src_mask", "is_causal"])
def test_torchs_transformers_with_a_mask(name: str) -> None:
    """Their code looks at the values of a mask to find out whether it is causal."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
            self.encoder, self.both = nn.TransformerEncoder(layer, 2), nn.Transformer(16, 4, 1, 1, 32, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            if name == "src_mask":
                return self.both(x, x, src_mask=mask, tgt_mask=mask)
            return self.encoder(x, mask=mask, is_causal=True if name == "is_causal" else None)

    costs = layer_costs(Words, (2, 5, 16))
    assert sum(row.flops for row in costs.rows) > 0


def test_a_wider_model_is_told_apart() -> None:
    inputs = torch.randn(3, 5, 16)
    costs = fake_run(lambda: Attention(num_heads=2), inputs)
    assert round(sum(row.saved_bytes for row in costs.rows) * 3) != real_run(Attention, inputs)[1]


def row(costs: ModelCosts, name: str) -> LayerCost:
    return next(row for row in costs.rows if row.layer.name == name)


def test_functions_belong_to_the_layer_that_they_follow() -> None:
    costs = layer_costs(Attention, (2, 5, 16))
    assert [row.layer.name for row in costs.rows] == ["norm", "qkv", "out"]
    assert [work.name for work in row(costs, "qkv").own] == ["linear"]
    assert [work.name for work in row(costs, "qkv").after] == ["split", "scaled_dot_product_attention"]
    assert [work.name for work in row(costs, "out").after] == ["add"]
    linear = row(costs, "qkv").own[0]
    assert (linear.flops, linear.inner, linear.saved_bytes) == (2 * 5 * 16 * 48, 16, 5 * 16 * 4)
    assert linear.moved_bytes == 5 * (16 + 48) * 4
    assert row(costs, "qkv").output_shape == (5, 48)


def test_backward_is_counted_where_its_forward_was() -> None:
    """A bias sums a gradient over its rows; slices are put together again; what two layers take has two gradients."""
    costs = layer_costs(lambda: nn.Sequential(Attention(), Attention()), (2, 5, 16))
    size, statistics = 5 * 16 * 4, 2 * 5 * 4
    split, attention = row(costs, "1.qkv").after
    assert (split.moved_bytes, split.backward_bytes) == (0, 2 * 3 * size)
    assert (row(costs, "1.qkv").own[0].backward_bytes, attention.backward_bytes) == (3 * size, 0)
    assert row(costs, "1.norm").own[0].backward_bytes == 3 * size + statistics + 3 * size
    assert row(costs, "1.out").after[0].backward_bytes == 0


def test_what_is_saved_belongs_to_the_function_that_saves_it() -> None:
    """A linear layer keeps its input, GELU too, ReLU its result: of two that keep one storage, the first has it."""
    costs = layer_costs(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2), nn.ReLU()), (1, 4))
    first, second = costs.rows
    assert [work.saved_bytes for work in (*first.own, *first.after)] == [4 * 4, 8 * 4]
    assert [work.saved_bytes for work in (*second.own, *second.after)] == [8 * 4, 2 * 4]


def test_parameters_that_others_read_are_their_layers() -> None:
    costs = layer_costs(lambda: nn.MultiheadAttention(16, 4, batch_first=True), _qkv())
    assert [work.name for work in row(costs, "out_proj").own] == ["linear"]


def _qkv() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 5, 16) for _ in range(3))


def test_tied_weights_stay_two_layers() -> None:
    costs = layer_costs(TiedWords, torch.zeros(2, 7, dtype=torch.int64))
    assert row(costs, "head").layer.tied_to == "words"
    assert [work.name for work in row(costs, "head").own] == ["linear"]
    assert costs.num_parameters == 20 * 8 + 3 * (8 * 16 + 16 + 16 * 8 + 8)
    assert costs.blocks == ((1, 2, 3),)


def test_figures_do_not_depend_on_the_batch() -> None:
    assert layer_costs(Attention, (2, 5, 16)).rows == layer_costs(Attention, (7, 5, 16)).rows


def test_the_module_stays_as_it_is_and_may_lie_on_meta() -> None:
    module = Attention()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    costs = layer_costs(module, (2, 5, 16))
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not any(sub._forward_hooks or sub._forward_pre_hooks for sub in module.modules())
    assert layer_costs(module.to("meta"), (2, 5, 16)) == costs


def test_other_numbers_take_other_bytes() -> None:
    costs = layer_costs(Attention, (2, 5, 16), dtype="bf16")
    assert costs.dtype == "bf16" and layer_costs(Attention, (2, 5, 16), dtype=torch.bfloat16) == costs
    assert row(costs, "qkv").own[0].saved_bytes == 5 * 16 * 2
    assert row(costs, "qkv").itemsize == 2


def test_under_autocast_products_make_16_bits_and_norms_and_residuals_keep_32() -> None:
    """Copies of weights are no activations, and a batch has them once; those of biases are not kept."""
    costs = layer_costs(Attention, (2, 5, 16))
    autocast = {row.layer.name: row for row in costs.autocast}
    assert autocast["qkv"].itemsize == 2 and row(costs, "qkv").itemsize == 4
    assert autocast["qkv"].num_cast == 16 * 48
    works = {work.name: work for work in autocast["qkv"].own}
    assert works["linear"].saved_bytes == 5 * 16 * 2
    assert works["to"].moved_bytes == 5 * 16 * (4 + 2)
    assert layer_costs(Attention, (7, 5, 16)).autocast == costs.autocast
    assert costs.under_autocast("fp32") is costs and costs.under_autocast("fp16").dtype == "fp16"
    assert layer_costs(Attention, (2, 5, 16), dtype="bf16").autocast == ()


def test_nothing_is_allocated() -> None:
    """A table of 40 GB."""
    costs = layer_costs(lambda: nn.Embedding(10**9, 10), torch.zeros(1, 3, dtype=torch.int64))
    assert costs.num_parameters == 10**10


class Reads(nn.Linear):
    """Looks at a value."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if input.sum().item() > 0 else input


class MadeOfValues(nn.Linear):
    """Cannot be made on meta."""

    def __init__(self) -> None:
        super().__init__(int(torch.linspace(4, 5, 2).tolist()[0]), 8)


def test_a_forward_that_reads_values_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"Reads.*reads values.*from shapes"):
        layer_costs(lambda: Reads(4, 4), (2, 4))
    with pytest.raises(StrategyError, match=r"reads values of tensors in 1\. "):
        layer_costs(nn.Sequential(nn.Linear(4, 4), Reads(4, 4)), (2, 4))


def masked(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[labels > 0], labels[labels > 0])


def ctc(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    lengths = torch.full((len(labels),), labels.shape[1])
    return nn.functional.ctc_loss(output.log_softmax(-1).transpose(0, 1), labels, lengths, lengths)


def clipped(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.sum() / max(labels.sum().item(), 1)


@pytest.mark.parametrize("loss_fn", [masked, ctc, clipped])
def test_of_a_loss_that_reads_values_the_layers_are_counted(loss_fn: Callable[..., torch.Tensor]) -> None:
    model, x, labels = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)),
        torch.zeros(2, 3, 4),
        torch.ones(2, 3),
    )
    with pytest.warns(UserWarning, match="the loss's own work is not counted from aten"):
        costs = layer_costs(model, x, loss_fn=loss_fn, targets=labels.long())
    without = layer_costs(model, x)
    assert [row.own for row in costs.rows] == [row.own for row in without.rows]
    assert costs.rows[0] == without.rows[0] and len(costs.autocast) == 2


def test_a_loss_that_fails_is_not_called_a_layer() -> None:
    with pytest.raises(StrategyError, match=r"ValueError in the loss on this batch: no"):
        layer_costs(nn.Linear(4, 4), (2, 4), loss_fn=lambda output, targets: (_ for _ in ()).throw(ValueError("no")))


def test_a_model_that_is_made_of_values_is_made_for_real() -> None:
    assert layer_costs(MadeOfValues, (2, 4)).rows[0].output_shape == (8,)


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (nn.ReLU(), (2, 4), "0 parameters"),
        (nn.Linear(4, 4), torch.tensor(1.0), "at least 1 sample"),
        (nn.Linear(4, 4), (0, 4), "at least 1 sample"),
        (nn.Linear(4, 4), {}, "no tensor"),
    ],
)
def test_what_cannot_be_counted_is_said(model: nn.Module, inputs: object, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        layer_costs(model, inputs)  # type: ignore[arg-type]


def names(*layers: str) -> list[LayerCost]:
    return [LayerCost(Layer(name, "Linear", {})) for name in layers]


def test_blocks_are_the_longest_runs() -> None:
    rows = names("words", *(f"h.{i}.{part}" for i in range(4) for part in ("up", "gate", "down")), "head")
    assert find_blocks(rows) == ((1, 3, 4),)
    assert find_blocks(names("a", "b", "c")) == ()
    assert find_blocks(names("0", "1", "2")) == ((0, 1, 3),)
    assert find_blocks([*names("a.0", "a.1"), *names("b.0", "b.1", "b.2")]) == ((0, 1, 2), (2, 1, 3))


def test_a_function_that_loads_weights_is_counted_without_a_warning() -> None:
    """Warnings are errors here."""
    start = nn.Linear(4, 8).state_dict()

    def make() -> nn.Module:
        model = nn.Linear(4, 8)
        model.load_state_dict(start)
        return model

    assert layer_costs(make, (2, 4)).num_parameters == 40


def test_fused_experts_that_read_values_are_counted_as_if_chosen_alike_often():
    """Of 2 x 6 tokens each chooses 2 of 4 experts, of 8 x 12 x 8. No attribute says 2."""

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.pool = nn.Linear(8, 4), Pool(4)

        def forward(self, x):
            tokens = x.flatten(0, 1)
            weights, chosen = self.router(tokens).softmax(-1).topk(2)
            return self.pool(tokens, chosen, weights).view_as(x)

    costs = layer_costs(Mixture(), (2, 6, 8))
    experts = costs.rows[1]
    assert (experts.layer.experts, experts.layer.chosen) == (4, 2)
    assert traced(describe(Mixture()), costs.rows, costs.sample_shape)[1].chosen == 2
    assert experts.flops == pytest.approx(6 * 2 * 2 * (8 * 12 + 12 * 8))


def test_activations_of_linear_layers_in_8_bits_are_those_that_are_held() -> None:
    """Queries, keys and values each keep their own, where 16 bits share one."""
    words = torch.arange(160).view(16, 10) % 48
    counted: list[float] = []
    held: list[float] = []
    for word in ("bf16", "fp8"):
        model = GPT(128, 2, 48, 10)
        compute_in(model, word, torch.device("cpu"), "cpu")
        meter = ActivationMeter(model)
        with meter.measure():
            loss = next_word_loss(model(words), words)
        loss.backward()
        costs = layer_costs(lambda: GPT(128, 2, 48, 10), words, loss_fn=next_word_loss, targets=words)
        rows = costs.under_autocast(word).rows
        counted.append(sum(row.saved_bytes * len(words) + 2 * row.num_cast for row in rows))
        held.append(meter.size_bytes)
    assert counted == pytest.approx(held, rel=1e-3)
    assert counted[1] < 0.75 * counted[0]
