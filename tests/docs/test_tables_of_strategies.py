"""Strategies that guides name for people who come from elsewhere are right: they fit a model."""

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from workbench.core.presets import strategy_of
from workbench.core.rows import Layer

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
QUOTED = re.compile(r'`"([^"`]*[:|][^"`]*)"`')


BLOCK = [
    Layer("attention", "MultiheadAttention", {"weight": (96, 32)}, 3072),
    Layer("up", "Linear", {"weight": (64, 32)}, 2048),
    Layer("down", "Linear", {"weight": (32, 64)}, 2048),
    Layer("moe.experts", "Experts", {"up": (16, 64, 32), "down": (16, 32, 64)}, 65536, experts=16, chosen=2),
]
LAYERS = [
    *(replace(layer, name=f"layers.{number}.{layer.name}") for number in range(20) for layer in BLOCK),
    *BLOCK[1:3],
    Layer("head", "Linear", {"weight": (128, 32)}, 4096),
]


@pytest.mark.parametrize("page", ["from-torch.md", "from-others.md", "which-strategy.md"])
def test_all_fit_a_model(page):
    found = [text for row in ROW.findall((GUIDES / page).read_text("utf-8")) for text in QUOTED.findall(row)]
    assert len(found) >= 2
    for text in (text.replace(r"\|", "|") for text in found):
        if "..." not in text:
            degrees = re.search(r"(\d+)x(\d+)x(\d+)", text)
            num_ranks = prod(map(int, degrees.groups())) if degrees else 16
            assert strategy_of(text, LAYERS, num_ranks).resolve(LAYERS, num_ranks).layers, text
