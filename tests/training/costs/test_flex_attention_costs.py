"""What layers cost whose attention is torch's ``flex_attention``: as with attention of torch, over blocks of a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from workbench.core.model_costs import OpCost
from workbench.training.costs.layer_costs import layer_costs

NUM_HEADS, LENGTH, WIDTH = 4, 256, 64
NAME = "scaled_dot_product_attention"


class Attention(nn.Module):
    def __init__(self, attend: Callable[..., Any], value_width: int = WIDTH, key_heads: int = NUM_HEADS) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH + value_width), nn.Linear(value_width, WIDTH)
        self.attend, self.value_width, self.key_heads = attend, value_width, key_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widths = [WIDTH, WIDTH, self.value_width]
        q, k, v = (t.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for t in self.qkv(x).split(widths, -1))
        y = self.attend(q, k[:, : self.key_heads], v[:, : self.key_heads])
        return self.out(y.transpose(1, 2).flatten(2))


def causal(sample: Any, head: Any, row: Any, column: Any) -> Any:
    return row >= column


def softcap(score: Any, sample: Any, head: Any, row: Any, column: Any) -> Any:
    return 2 * torch.tanh(score / 2)


def attention_of(*args: Any, under_autocast: bool = False) -> OpCost:
    costs = layer_costs(lambda: Attention(*args), (2, LENGTH, WIDTH))
    rows = costs.autocast if under_autocast else costs.rows
    (found,) = (work for row in rows for work in (*row.own, *row.after) if work.name == NAME)
    return found


@pytest.mark.parametrize("under_autocast", [False, True])
def test_blocks_that_a_mask_hides_are_not_computed(under_autocast: bool) -> None:
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")  # 2 x 2 blocks, one of them hidden
    before = flex_module.flex_attention_hop
    found = attention_of(lambda q, k, v: flex_attention(q, k, v, softcap, mask), under_autocast=under_autocast)
    truth = attention_of(F.scaled_dot_product_attention, under_autocast=under_autocast)
    assert truth.flops == 4 * LENGTH * LENGTH * WIDTH
    assert found == replace(truth, flops=0.75 * truth.flops)
    assert flex_module.flex_attention_hop is before


def made_in_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu"))


@pytest.mark.parametrize("attend", [flex_attention, made_in_forward])
def test_without_a_mask_that_has_values_all_blocks_count(attend: Callable[..., Any]) -> None:
    assert attention_of(attend).flops == 4 * LENGTH * LENGTH * WIDTH


def test_values_may_be_narrower_and_heads_of_keys_fewer() -> None:
    assert attention_of(flex_attention, WIDTH // 2).flops == 3 * LENGTH * LENGTH * WIDTH
    few = attention_of(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True), WIDTH, 2)
    assert few.flops == 4 * LENGTH * LENGTH * WIDTH and few.attention is not None and few.attention.key_heads == 2
