"""Models whose activations are not all (batch, sequence, features): positions alike for all samples, the batch in the
second dim, tokens of all samples in one, images, dicts, tuples and scalars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LENGTH, WIDTH, WORDS = 8, 16, 32


class Block(nn.Module):
    """A norm and a perceptron beside the way."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.ln(x))))


class Words(nn.Module):
    """Words in, a class of every word out; what lies between is the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(WORDS, WIDTH)
        self.build()
        self.head = nn.Linear(WIDTH, WORDS)

    def build(self) -> None:
        self.block = Block()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.tok(words))).transpose(1, 2)


class Positions(Words):
    """Positions without a batch dim: (sequence, features)."""

    def build(self) -> None:
        self.pos, self.block = nn.Embedding(LENGTH, WIDTH), Block()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x + self.pos(torch.arange(LENGTH)))


class OnePosition(Positions):
    """(1, sequence, features)."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x + self.pos(torch.arange(LENGTH)[None]))


class ProjectedPositions(Words):
    """A layer after the positions takes what is alike for all samples."""

    def build(self) -> None:
        self.pos, self.proj, self.block = nn.Embedding(LENGTH, WIDTH), nn.Linear(WIDTH, WIDTH), Block()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x + self.proj(self.pos(torch.arange(LENGTH))))


class OwnPositions(Words):
    """The model has a parameter of its own, and layers inside."""

    def build(self) -> None:
        self.positions, self.block = nn.Parameter(torch.zeros(1, LENGTH, WIDTH)), Block()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x + self.positions)


class Recurrent(Words):
    """(sequence, batch, features), and a tuple out."""

    def build(self) -> None:
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x.transpose(0, 1))[0].transpose(0, 1)


class Attention(Words):
    """The same in attention, whose last weight is read by a function."""

    def build(self) -> None:
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        return self.attention(x, x, x, need_weights=False)[0].transpose(0, 1)


class Flat(Words):
    """The words of all samples in one dim."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out = self.head(self.between(self.tok(words.reshape(-1))))
        return out.reshape(*words.shape, WORDS).transpose(1, 2)


class Convolution(Words):
    """(batch, features, sequence)."""

    def build(self) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Times(nn.Module):
    """A product with a weight, in what ``wrap`` makes of it."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.wrap = nn.Parameter(torch.eye(WIDTH)), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(x @ self.weight)


class InADict(Words):
    """A layer that gives a dict."""

    def build(self) -> None:
        self.times = Times(lambda y: {"y": y})

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.times(x)["y"]


class InATuple(Words):
    """A layer that gives two tensors."""

    def build(self) -> None:
        self.times = Times(lambda y: (y, y.sum()))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.times(x)[0]


class Scale(nn.Module):
    """A number that takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self) -> torch.Tensor:
        return self.log.exp()


class Scaled(Words):
    """A layer without inputs, whose output has no dims."""

    def build(self) -> None:
        self.scale, self.fc = Scale(), nn.Linear(WIDTH, WIDTH)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x * self.scale())


class Twice(Words):
    """One layer, called with two shapes."""

    def build(self) -> None:
        self.fc = nn.Linear(WIDTH, WIDTH)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + self.fc(x.mean(1)).unsqueeze(1)


MODELS: list[type[Words]] = [
    Words, Positions, OnePosition, ProjectedPositions, OwnPositions, Recurrent, Attention, Flat, Convolution, InADict,
    InATuple, Scaled, Twice,
]  # fmt: skip


def batches(num_samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, and the target word at every place."""
    generator = torch.Generator().manual_seed(0)
    words, targets = (torch.randint(0, WORDS, (num_samples, LENGTH), generator=generator) for _ in range(2))
    return words, targets
