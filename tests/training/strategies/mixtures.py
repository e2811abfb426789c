"""Mixtures of experts as a user writes them: a router with a balancing loss, a shared expert, dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

FEATURES, WIDTH, CLASSES, LENGTH, SAMPLES = 6, 8, 5, 5, 8


class Pool(nn.Module):
    """All experts in one tensor per weight. Tokens are (tokens, 8)."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 12) / 3)
        self.bias = nn.Parameter(torch.randn(experts, 12) / 3)
        self.down = nn.Parameter(torch.randn(experts, 12, WIDTH) / 3)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for number in range(self.num_experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            inner = F.gelu(x[rows] @ self.up[number] + self.bias[number])
            result = result.index_add(0, rows, inner @ self.down[number] * weights[rows, places, None])
        return result


class Experts(nn.ModuleList):
    """A list of experts with dropout inside, which the caller loops over."""

    def __init__(self, experts: int) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Dropout(0.1), nn.Linear(9, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for number, expert in enumerate(self):
            rows, places = torch.where(chosen == number)
            result.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return result


class Mixture(nn.Module):
    """(samples, 5, 6) and classes -> the loss, with that of balance over the whole batch.

    ``pool`` are its experts, in one tensor per weight; ``listed``: ``experts``, a list.
    """

    def __init__(self, experts: int = 8, best: int = 2, dropout: float = 0.2, listed: bool = False) -> None:
        super().__init__()
        self.best = best
        self.first, self.router = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.listed = listed
        if listed:
            self.experts = Experts(experts)
        else:
            self.pool = Pool(experts)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.first(x))
        tokens = hidden.reshape(-1, WIDTH)
        odds = self.router(tokens).softmax(-1)
        weights, chosen = odds.topk(self.best)
        experts = self.experts if self.listed else self.pool
        mixed = experts(tokens, chosen, weights).view_as(hidden) + self.shared(hidden)
        often = F.one_hot(chosen, odds.shape[-1]).to(odds.dtype).sum(1).mean(0)
        balance = odds.shape[-1] * (often * odds.mean(0)).sum()
        return F.cross_entropy(self.head(self.dropout(mixed).mean(1)), classes) + 0.1 * balance


def batch_of(step: int, samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(samples, LENGTH, FEATURES, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (samples,), generator=draw)
