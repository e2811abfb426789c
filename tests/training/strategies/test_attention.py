"""torch's own attention under ``model``: each rank has its part of the weights; numbers are those of one device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks

WIDTH, HEADS = 16, 4
MASK = torch.ones(5, 5, dtype=torch.bool).triu(1)


class Seq2Seq(nn.Module):
    """An encoder and a decoder of torch, with masks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, **options}
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, **options)
        self.head = nn.Linear(WIDTH, 3)
        self.is_first = options["batch_first"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = (torch.arange(5) == 4).expand(x.shape[0], 5)
        x = x if self.is_first else x.transpose(0, 1)
        memory = self.encoder(x, mask=MASK, is_causal=True)
        x = self.decoder(x, memory, tgt_mask=MASK, memory_key_padding_mask=padding)
        return self.head(x if self.is_first else x.transpose(0, 1))


class Shares(nn.Module):
    """Attention that gives its shares of the keys, on keys and values of other widths."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 10)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=6, vdim=10, batch_first=True, **options)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, shares = self.attention(x, self.keys(x), self.values(x))
        return self.head(result) + shares.square().sum(-1, keepdim=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "seq2seq": Seq2Seq,
    "norms first, no bias": lambda: Seq2Seq(norm_first=True, bias=False),
    "steps first": lambda: Seq2Seq(batch_first=False),
    "shares": Shares,
    "shares, no bias": lambda: Shares(bias=False),
    "more keys": lambda: Shares(add_bias_kv=True, add_zero_attn=True),
}
IN_TWO = "*: model; decoder: model@1; head: model@1 | 2x1x2 mb=2"
STRATEGIES = [
    *itertools.product(MODELS, ["*: model"], [2]),
    ("seq2seq", "*: data; *.self_attn: model", 3),
    pytest.param("seq2seq", IN_TWO, 4, marks=pytest.mark.slow),
    ("more keys", "*: data; attention: model:row", 2),
    pytest.param("seq2seq", "*: model | 1x1x3 mb=3", 3, marks=pytest.mark.slow),
    pytest.param("seq2seq", "*: model | 1x2x2 zero=3 recompute", 4, marks=pytest.mark.slow),
    pytest.param("norms first, no bias", "*: model | 1x2x2 sequence mb=2 zero=1", 4, marks=pytest.mark.slow),
    pytest.param("steps first", IN_TWO, 4, marks=pytest.mark.slow),
]


def batch(num_samples: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_samples, 5, WIDTH, generator=generator), torch.randn(num_samples, 5, 3, generator=generator)


def train(model: nn.Module, step: Callable[[Any, Any], torch.Tensor]) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        loss = step(*batch())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return [*losses, F.mse_loss(model(batch()[0]), batch()[1]).item()]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.mark.parametrize(("name", "text", "num_ranks"), STRATEGIES)
def test_training_and_evaluation_give_the_numbers_of_one_device(name: str, text: str, num_ranks: int) -> None:
    model = made(name)

    def program() -> tuple[list[float], dict[str, torch.Tensor]]:
        split = wb.parallelize(copy.deepcopy(model), text)
        losses = train(split, lambda x, y: wb.forward_backward(split, F.mse_loss, x, y))
        return losses, {name: parameter.full_tensor().detach() for name, parameter in split.named_parameters()}

    def alone(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    found = run_ranks(program, num_ranks)
    expected = train(model, alone)
    for losses, weights in found:
        assert losses == pytest.approx(expected, rel=1e-4)
        for key, weight in model.named_parameters():
            torch.testing.assert_close(weights[key], weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_has_its_part_of_all_matrices_of_attention(num_ranks: int) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True), Shares())

    def program() -> dict[str, tuple[int, int]]:
        split = wb.parallelize(copy.deepcopy(model), "*: model")
        matrices = {name: p for name, p in split.named_parameters() if "att" in name and p.dim() == 2}
        return {name: (p.to_local().numel(), p.numel()) for name, p in matrices.items()}

    for sizes in run_ranks(program, num_ranks):
        assert len(sizes) == 2 + 4
        assert all(here * num_ranks == whole for here, whole in sizes.values()), sizes


@pytest.mark.parametrize(("num_samples", "moved"), [(2, 2 * 5 * WIDTH), (6, WIDTH * WIDTH)])
def test_attention_has_one_sum_and_moves_the_fewer_of_features_and_rows(num_samples: int, moved: int) -> None:
    """Of two ranks, each lacks a third of what belongs to its heads. The plan counts the sum."""
    model = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True))
    x = batch(num_samples)[0]

    def program() -> tuple[list[tuple[str, str, int]], list[int]]:
        split = wb.parallelize(copy.deepcopy(model), "*: model")
        with wb.debug.trace() as boxings:
            split(x)
        plans = {layer.layer.name: layer for layer in split.plan.layers_of()}
        sizes = [plans[f"0.self_attn{part}"].boxes_output.forward_bytes for part in ("", ".out_proj")]
        records = [record for record in boxings.records if "att" in record.function and record.wire_bytes]
        return [(record.function, record.kind, record.wire_bytes) for record in records], sizes

    found, sizes = run_ranks(program, 2)[0]
    a_sum = 2 * x.numel() * 4
    assert {kind: size for _, kind, size in found} == {"all-reduce": a_sum, "rows": moved * 4} and len(found) == 2
    assert sizes == [0, a_sum]


@pytest.mark.slow
def test_a_captured_step_moves_the_same() -> None:
    model = made("seq2seq")

    def program(captures: bool) -> list[float]:
        split = wb.parallelize(copy.deepcopy(model), "*: model")
        optimizer = torch.optim.SGD(split.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(split(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        run = wb.capture(step) if captures else step
        return [run(*batch()).item() for _ in range(4)]

    plain, captured = (run_ranks(lambda captures=each: program(captures), 2) for each in (False, True))
    assert captured == plain


def test_a_checkpoint_of_split_attention_loads_whole(tmp_path: Any) -> None:
    model, fresh = made("seq2seq"), Seq2Seq()
    expected = model.state_dict()

    def save() -> None:
        wb.checkpoint.save(tmp_path / "model", model=wb.parallelize(copy.deepcopy(model), "*: model"))

    def load() -> dict[str, torch.Tensor]:
        other = wb.parallelize(copy.deepcopy(fresh), "*: data")
        wb.checkpoint.load(tmp_path / "model", model=other)
        return {name: parameter.full_tensor().detach() for name, parameter in other.named_parameters()}

    run_ranks(save, 2)
    for name, value in run_ranks(load, 3)[0].items():
        assert torch.equal(value, expected[name])
