"""A small GPT whose blocks are attention or a feed-forward part, dense or a mixture of experts; plain torch.

Its eight parts, a table, six blocks and a head, make up to eight stages that cut no block in two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, WORDS, LENGTH, HEADS, EXPERTS, CHOSEN, RATE = 8, 11, 6, 4, 4, 2, 0.2


class Table(nn.Module):
    """Words and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(RATE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))


class Attention(nn.Module):
    """Causal attention behind a norm, with a residual; the second result is no loss of balance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=RATE if self.training else 0.0, is_causal=True)
        return x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))), None


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))), None


def chosen_by(numbers: torch.Tensor, experts: int) -> torch.Tensor:
    """(tokens, chosen) -> whether a token has chosen an expert that way, (tokens, chosen, experts)."""
    return numbers[..., None] == torch.arange(experts, device=numbers.device)


class Pool(nn.Module):
    """All experts in one tensor per weight; each works on all tokens, so that no value is read."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH) / 3)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        share = (chosen_by(numbers, len(self.up)) * weights[..., None]).sum(1)
        inner = F.gelu(torch.einsum("td,edf->tef", x, self.up)) * share[..., None]
        return torch.einsum("tef,efd->td", inner, self.down)


class Mixture(nn.Module):
    """A router, its loss of balance over the whole batch, and experts in one tensor per weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.pool = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False), Pool()
        self.dropout = nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.norm(x).reshape(-1, WIDTH)
        odds = self.router(tokens).softmax(-1)
        weights, chosen = odds.topk(CHOSEN)
        mixed = self.pool(tokens, chosen, weights).view_as(x)
        often = chosen_by(chosen, EXPERTS).to(odds.dtype).sum(1).mean(0)
        return x + self.dropout(mixed), EXPERTS * (often * odds.mean(0)).sum()


class SmallGPT(nn.Module):
    """Words (samples, length) and the words that follow -> the loss."""

    def __init__(self, with_experts: bool) -> None:
        super().__init__()
        other = Mixture if with_experts else FeedForward
        self.table, self.blocks = Table(), nn.ModuleList(kind() for _ in range(3) for kind in (Attention, other))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, balances = self.table(ids), []
        for block in self.blocks:
            x, balance = block(x)
            balances += [] if balance is None else [balance]
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return loss + 0.1 * sum(balances)


PARTS = ("table", *(f"blocks.{number}" for number in range(6)), "head")
