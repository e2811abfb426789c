"""Choices without effect are said, and only those."""

from __future__ import annotations

import pytest

from tests.ui.models import gpt
from workbench.core.ineffective_choices import find_ineffective_choices, rows_that_split_nothing
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy

LAYERS = [
    Layer("fc1", "Linear", {"weight": (8, 8), "bias": (8,)}),
    Layer("norm", "LayerNorm", {"weight": (8,)}),
    Layer("fc2", "Linear", {"weight": (8, 8)}),
]


def found(text: str, num_ranks: int) -> dict[str | None, str]:
    return {hint.layer: hint.reason for hint in find_ineffective_choices(Strategy(text).resolve(LAYERS, num_ranks))}


def test_data_and_split_layers_have_none():
    assert found("*: data", 2) == {}
    assert found("fc1: model; norm: data; fc2: model", 2) == {}


def test_a_layer_of_which_nothing_is_split_is_named():
    (reason,) = found("*: model", 2).values()
    assert list(found("*: model", 2)) == ["norm"] and "every rank holds all of this layer's weights" in reason


def test_a_pipeline_of_one_micro_batch_is_named_with_a_way_out():
    (hint,) = find_ineffective_choices(Strategy("fc1: data; norm: data; fc2: data@1").resolve(LAYERS, 2))
    assert hint.layer is None and "the 2 stages work one after another" in hint.message
    assert hint.fix == "use mb=4"
    assert found("fc1: data; norm: data; fc2: data@1 | mb=4", 2) == {}


@pytest.mark.parametrize("text", ["*: data | 1x2x1", "*: data | 1x2x1 mb=4"])
def test_without_stages_micro_batches_are_no_matter(text: str):
    assert found(text, 2) == {}


def test_every_hint_is_about_a_layer_that_no_rank_holds_a_part_of():
    layers = gpt(2).layers
    resolved = Strategy("*: model").resolve(layers, 2)
    whole = {layer.name for layer in resolved.layers if layer.split is None}
    assert {hint.layer for hint in find_ineffective_choices(resolved)} == whole and whole


RECURRENT = [*LAYERS, Layer("rnn", "LSTM", {"weight_ih_l0": (32, 8), "bias_ih_l0": (32,)}, 288)]


def split_nothing(text: str, num_ranks: int = 2) -> list[str]:
    strategy = Strategy(text)
    return rows_that_split_nothing(strategy, RECURRENT, strategy.resolve(RECURRENT, num_ranks))


def test_a_row_that_names_a_layer_and_splits_nothing_of_it_is_said():
    (text,) = split_nothing("*: data; rnn: model")
    assert "'rnn: model' splits no weight" in text and "each of 2 ranks holds all 288 of rnn (LSTM)" in text
    assert "write data" in text


@pytest.mark.parametrize("text", ["*: data", "*: data; norm: model", "fc*: model; rnn: model"])
def test_rows_for_all_layers_for_vectors_and_beside_split_layers_are_as_meant(text: str):
    assert split_nothing(text) == []


@pytest.mark.parametrize(("largest", "is_said"), [(200, True), (400, False)])
def test_a_model_most_of_which_stays_whole_under_model_is_said(largest: int, is_said: bool):
    layers = [RECURRENT[-1], Layer("head", "Linear", {"weight": (largest // 8, 8)}, largest)]
    strategy = Strategy("*: model")
    texts = rows_that_split_nothing(strategy, layers, strategy.resolve(layers, 2))
    assert len(texts) == is_said
    assert not is_said or "less than half of the weights: each of 2 ranks holds 288 of 488, the most" in texts[0]


def test_on_a_model_axis_of_one_rank_nothing_is_said():
    assert split_nothing("*: data; rnn: model | 1x2x1") == []


@pytest.mark.parametrize(
    ("text", "num_ranks", "option"),
    [
        ("*: data | 1x2x1 sequence", 2, "sequence"),
        ("*: data | 1x1x1 zero=3", 1, "zero=3"),
        ("*: data; fc2: data@1 | 2x1x1 mb=4 zero=1", 2, "zero=1"),
        ("*: data | 1x2x1 mb=4 zero_bubble", 2, "zero_bubble"),
    ],
)
def test_an_option_of_which_these_ranks_have_nothing_is_named(text: str, num_ranks: int, option: str):
    (hint,) = find_ineffective_choices(Strategy(text).resolve(LAYERS, num_ranks))
    assert hint.layer is None and hint.message.startswith(f"{option} ") and hint.fix == f"leave {option} out"


@pytest.mark.parametrize(
    ("text", "num_ranks"),
    [
        ("fc*: model; norm: data | 1x1x2 sequence zero=1", 2),
        ("*: data | 1x2x1 zero=3", 2),
        ("*: data; fc2: data@1 | 2x1x1 mb=4 zero_bubble", 2),
        ("*: data; fc2: data@1 | 1x2+1x1 mb=4 zero=1", 3),
    ],
)
def test_an_option_with_an_effect_on_some_ranks_is_not(text: str, num_ranks: int):
    assert found(text, num_ranks) == {}
