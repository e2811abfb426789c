"""Which layers share a row."""

from __future__ import annotations

import random

import pytest

from tests.core.odd_names import odd_names
from tests.ui.models import gpt, linear
from workbench.core.rows import Layer, Row
from workbench.ui.strategy.grouping import find, fold, tree, visible, walk


def labels(layers: list[Layer], choices: list[object] | None = None) -> list[str]:
    return [node.label for node in tree(layers, choices or [0] * len(layers))]


def test_equal_blocks_are_one_row_with_the_layers_of_one_below_it():
    nodes = tree(gpt(4).layers, [0] * 28)
    assert [node.label for node in nodes] == ["tok_emb", "pos_emb", "blocks.0-3 \u00d74", "ln_f", "lm_head"]
    blocks = nodes[2]
    assert blocks.copies == 4 and len(blocks.layers) == 24 and blocks.first == (2, 3, 4, 5, 6, 7)
    assert [child.label for child in blocks.children] == ["ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc1", "mlp.fc2"]
    assert blocks.children[1].layers == (3, 9, 15, 21)


def test_a_run_is_cut_where_its_blocks_do_something_else():
    choices: list[object] = [0] * 14 + [1] * 14
    assert labels(gpt(4).layers, choices)[2:4] == ["blocks.0-1 \u00d72", "blocks.2-3 \u00d72"]


def test_many_pieces_have_a_head():
    layers = gpt(6).layers
    choices: list[object] = [index // 8 for index in range(len(layers))]
    nodes = tree(layers, choices)
    head = next(node for node in nodes if node.children)
    assert head.label == "blocks.0-5 \u00d76" and len(head.children) >= 3
    assert [row.depth for row in visible([head], set())][:2] == [0, 1], "open from the start"
    assert len(visible([head], fold(head, set()))) == 1


def test_blocks_of_other_shapes_stand_alone():
    layers = [linear("h.0.a", 8, 8), linear("h.0.b", 8, 8), linear("h.1.a", 8, 8), linear("h.1.b", 8, 16)]
    assert labels(layers) == ["h.0", "h.1"]


@pytest.mark.parametrize(("number", "rows"), [(3, ["0", "1", "2"]), (4, ["0-3 \u00d74"])])
def test_few_single_layers_are_not_worth_folding(number: int, rows: list[str]):
    assert labels([linear(str(index), 8, 8) for index in range(number)]) == rows


def test_layers_without_numbers_are_rows():
    assert labels([linear("encoder.fc", 8, 8), linear("decoder.fc", 8, 8)]) == ["encoder.fc", "decoder.fc"]


def test_patterns_cover_exactly_the_layers_of_their_rows():
    layers = gpt(6).layers
    choices: list[object] = [index // 8 for index in range(len(layers))]
    for node in walk(tree(layers, choices)):
        matched = tuple(index for index, layer in enumerate(layers) if Row(node.pattern).matches(layer.name))
        assert matched == tuple(sorted(node.layers)), node.pattern


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_patterns_cover_their_layers_whatever_the_names_are(seed: int):
    rng = random.Random(seed)
    names = odd_names(rng)
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    layers = [linear(name, 8, rng.choice([8, 8, 16])) for name in names]
    for node in walk(tree(layers, [rng.choice([0, 0, 1]) for _ in layers])):
        matched = tuple(index for index, layer in enumerate(layers) if Row(node.pattern).matches(layer.name))
        assert matched == tuple(sorted(node.layers)), node.pattern


def test_a_row_of_numbers_with_zeros_in_front():
    names = [f"blocks.{n:02d}.{part}" for n in range(12) for part in ("a", "b")]
    block = tree([linear(name, 8, 8) for name in names], [0] * 24)[0]
    assert (block.pattern, block.label, block.copies) == ("blocks.[00-11]", "blocks.00-11 \u00d712", 12)


def test_finding_gives_single_layers():
    layers = gpt(12).layers
    assert [row.node.label for row in find(layers, "blocks.1.attn")] == ["blocks.1.attn.qkv", "blocks.1.attn.proj"]
    assert [row.node.label for row in find(layers, "*.1?.mlp.fc1")] == ["blocks.10.mlp.fc1", "blocks.11.mlp.fc1"]
