"""Small models that call some layers several times, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, WIDTH = 16, 12
FLOATS, CLASSES = torch.ones(BATCH, WIDTH), torch.arange(BATCH) % 6
SERIES = torch.ones(BATCH, 5, WIDTH)
PICTURES = torch.ones(BATCH, 4, 6, 6)
WORDS = torch.arange(BATCH * 5).view(BATCH, 5) % 24


class Twice(nn.Module):
    """One layer behind itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.fc(torch.relu(self.fc(x)))))


class TwoTimesThree(nn.Module):
    """Two layers by turns, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.down(torch.relu(self.up(x)))
        return self.head(x)


class Residuals(TwoTimesThree):
    """The same on a residual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.down(torch.relu(self.up(x)))
        return self.head(x)


class Normed(nn.Module):
    """One norm before two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.b(self.norm(torch.tanh(self.a(self.norm(x)))))))


class Convolved(nn.Module):
    """One convolution, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.relu(self.conv(x))
        return self.head(x.mean(dim=(2, 3)))


class BatchNormed(nn.Module):
    """A block of a convolution and a batch norm, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.relu(self.norm(self.conv(x)))
        return self.head(x.mean(dim=(2, 3)))


class Recurrent(nn.Module):
    """A state that is carried over the steps of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.carry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        state = torch.tanh(self.read(series[:, 0]))
        for step in range(1, series.shape[1]):
            state = torch.tanh(self.read(series[:, step]) + self.carry(state))
        return self.head(state)


class Cell(nn.Module):
    """A cell that takes step and state as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(series[:, 0])
        for step in range(series.shape[1]):
            state = torch.tanh(self.cell(torch.cat([series[:, step], state], dim=-1)))
        return self.head(state)


class Siamese(nn.Module):
    """One encoder for two halves of the batch's features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x[:, :6]) - self.encode(x[:, 6:]))


class Block(nn.Module):
    """Attention and two layers, with norms before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (p.view(batch, length, 4, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.proj(mixed)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class SharedBlocks(nn.Module):
    """A transformer whose only block is called three times (ALBERT)."""

    def __init__(self, num_calls: int = 3) -> None:
        super().__init__()
        self.words, self.block, self.norm = nn.Embedding(24, WIDTH), Block(), nn.LayerNorm(WIDTH)
        self.head, self.num_calls = nn.Linear(WIDTH, 24), num_calls

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for _ in range(self.num_calls):
            x = self.block(x)
        return self.head(self.norm(x))


class TwoTables(nn.Module):
    """One table for two texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(24, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        both = torch.tanh(self.words(words)) + torch.tanh(self.words(words.flip(1)))
        return self.head(torch.relu(self.mix(both)).mean(dim=1))


class Projections(nn.Module):
    """One head over three depths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out, self.b, self.head = *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.out(torch.relu(self.a(x))))
        return self.head(torch.relu(self.out(torch.relu(self.b(x)))))


class Deep(nn.Module):
    """One layer eight times, as in a network in equilibrium."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.enter(x)
        found = torch.tanh(given)
        for _ in range(8):
            found = torch.tanh(self.again(found) + given)
        return self.head(found)


class Sequence(nn.Module):
    """The same modules listed twice."""

    def __init__(self) -> None:
        super().__init__()
        a, b = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.layers = nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), a, nn.ReLU(), b, nn.ReLU(), nn.Linear(WIDTH, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Attended(nn.Module):
    """One attention, twice, whose queries, keys and values take the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        x = series
        for _ in range(2):
            q, k, v = (
                layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
            )
            x = self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(x.mean(dim=1))


def of_words(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Mean loss over all words."""
    return F.cross_entropy(output.flatten(0, 1), words.flatten())


Case = tuple[Callable[[], nn.Module], torch.Tensor, Any, Callable[..., torch.Tensor]]
MODELS: dict[str, Case] = {
    kind.__name__: (kind, inputs, CLASSES, F.cross_entropy)
    for kind, inputs in (
        (Twice, FLOATS),
        (TwoTimesThree, FLOATS),
        (Residuals, FLOATS),
        (Normed, FLOATS),
        (Convolved, PICTURES),
        (BatchNormed, PICTURES),
        (Recurrent, SERIES),
        (Cell, SERIES),
        (Siamese, FLOATS),
        (Attended, SERIES),
        (TwoTables, WORDS),
        (Projections, FLOATS),
        (Deep, FLOATS),
        (Sequence, FLOATS),
    )
} | {"SharedBlocks": (SharedBlocks, WORDS, WORDS, of_words)}
"""By name: what makes the model, a batch, its targets and a loss."""
