"""Rows that cover: whatever the layers do, the written rows say the same, and are few where blocks are alike."""

from __future__ import annotations

import random

import pytest

from tests.core.odd_names import odd_names
from workbench.core.compress_patterns import compress_patterns
from workbench.core.rows import Layer, Row
from workbench.core.strategy import Strategy

GPT = [
    "tok_emb",
    *(f"blocks.{n}.{part}" for n in range(8) for part in ("ln_1", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
    "lm_head",
]


def row(choice: str, stage: int | None = None) -> Row:
    parallel, _, split = choice.partition(":")
    return Row("", parallel, split or None, stage)


def assert_says(names: list[str], rows: list[Row]) -> None:
    """The covering rows decide for every layer what its row does."""
    strategy = Strategy.from_rows(compress_patterns(names, rows))
    assert Strategy(str(strategy)) == strategy, "in this form strategies go to engines"
    assert Strategy(" ".join(str(strategy).split())) == strategy, "as files are read"
    decide = strategy.rows_of([Layer(name, "", experts=8) for name in names])
    for name, wanted, found in zip(names, rows, decide, strict=True):
        assert found == strategy.row_of(Layer(name, "", experts=8))
        assert (found.parallel, found.split, found.stage) == (wanted.parallel, wanted.split, wanted.stage), name


def test_all_alike_is_one_row():
    assert [str(r) for r in compress_patterns(GPT, [row("data")] * len(GPT))] == ["*: data"]


def test_blocks_that_do_the_same_are_a_range():
    stages = [0, *[n // 4 for n in range(8) for _ in range(5)], 1]
    rows = [row("data", stage) for stage in stages]
    written = [str(r) for r in compress_patterns(GPT, rows)]
    assert written == ["tok_emb: data@0", "blocks.[0-3]: data@0", "blocks.[4-7]: data@1", "lm_head: data@1"]


def test_exceptions_stand_behind_what_is_usual():
    rows = [row("model" if "ln_1" not in name else "data") for name in GPT]
    written = [str(r) for r in compress_patterns(GPT, rows)]
    assert written == ["tok_emb: model", "blocks.[0-7]: model", "blocks.[0-7].ln_1: data", "lm_head: model"]
    assert_says(GPT, rows)


def test_a_flat_model_is_written_layer_by_layer():
    assert [str(r) for r in compress_patterns(["fc1", "fc2"], [row("data"), row("model")])] == [
        "fc1: data",
        "fc2: model",
    ]


def test_a_layer_that_has_layers_below_it():
    names = ["attn", "attn.out_proj", "fc"]
    assert_says(names, [row("model"), row("data"), row("model")])
    assert_says(names, [row("model"), row("model"), row("data")])


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_layers_do(seed: int):
    rng = random.Random(seed)
    choices = [row("data"), row("model"), row("model:row", 1), row("data", 0)][: rng.randint(2, 4)]
    names = [*GPT, "attn", "attn.out_proj", "deep.0.1.fc", "deep.0.2.fc", "deep.2.1.fc", "deep.1.fc"]
    assert_says(names, [rng.choice(choices) for _ in names])


def test_layers_of_the_digits_keep_their_names():
    layers = [Layer(f"fc{n}", "Linear") for n in range(3)]
    assert len(compress_patterns([layer.name for layer in layers], [row("data"), row("data"), row("model")])) == 3


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_names_are(seed: int):
    rng = random.Random(seed)
    names = odd_names(rng)
    choices = [row("data"), row("model"), row("model:row", 1), row("expert")][: rng.randint(2, 3)]
    by_part = {name.split(".")[0]: rng.choice(choices) for name in names}
    assert_says(names, [by_part[name.split(".")[0]] if rng.random() < 0.9 else rng.choice(choices) for name in names])


def test_numbers_keep_their_width():
    names = [f"blocks.{n:02d}.fc" for n in range(12)]
    written = compress_patterns(names, [row("data", n // 6) for n in range(12)])
    assert [str(r) for r in written] == ["blocks.[00-05]: data@0", "blocks.[06-11]: data@1"]
    assert [name for name in names if written[1].matches(name)] == names[6:]
    assert Row("blocks.[0-11]").matches("blocks.9") and not Row("blocks.[0-11]").matches("blocks.09")


def test_numbers_that_no_range_says_are_rows_of_their_own():
    for names in (["08", "9"], ["3", "1"], ["0", "20261127"], ["1", "01", "2"]):
        rows = compress_patterns([*names, "head"], [*(row("model") for _ in names), row("data")])
        assert [r.pattern for r in rows] == [*names, "head"]
