"""Models, data and losses that exported scripts import."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

NUM_STEPS, BATCH_SIZE = 6, 8


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


class Attention(nn.Module):
    """Causal attention; ``num_heads`` of -1 asks for any number of heads."""

    def __init__(self, width: int, fused: bool, num_heads: int) -> None:
        super().__init__()
        self.fused, self.num_heads = fused, num_heads
        names = ["qkv"] if fused else ["q_proj", "k_proj", "v_proj"]
        for name in names:
            setattr(self, name, nn.Linear(width, width * 3 // len(names)))
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.qkv(x).chunk(3, -1) if self.fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (each.unflatten(-1, (self.num_heads, 8)).transpose(1, 2) for each in one)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, fused: bool, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, fused, num_heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, fused: bool = False, num_heads: int = -1) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block(32, fused, num_heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def transformer() -> nn.Module:
    return Transformer()


def fused() -> nn.Module:
    return Transformer(fused=True)


def fixed_heads() -> nn.Module:
    return Transformer(num_heads=4)


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))


class Pairs(torch.utils.data.Dataset):
    """A data set that is made without arguments."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return vectors[0][index], vectors[1][index]


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.layer(x), labels)}


class Unused(nn.Module):
    """Has parameters without a gradient, and returns its own loss in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output = self.layer(x)
        return F.cross_entropy(output, labels), output, self.other(x)


def drawn() -> torch.utils.data.Dataset[Any]:
    """Samples that are drawn with all generators: a part is left out, and classes are random."""
    kept, _ = torch.utils.data.random_split(torch.utils.data.TensorDataset(vectors[0]), [16, 8])
    classes = np.random.permutation(16) % 4  # noqa: NPY002 - as data sets do
    random.shuffle(kept.indices)
    return torch.utils.data.StackDataset(torch.utils.data.Subset(vectors[0], kept.indices), torch.from_numpy(classes))  # type: ignore[arg-type]


def table() -> dict[str, torch.Tensor]:
    """A data set of named columns."""
    return {"x": vectors[0], "labels": vectors[1]}


def count(inputs: torch.Tensor, targets: torch.Tensor) -> int:
    return int((targets != 0).sum())


def optimizer_fn(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def mean_over_words(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


_generator = torch.Generator().manual_seed(1)
vectors = (torch.randn(24, 8, generator=_generator), torch.arange(24) % 4)
texts = tuple(torch.randint(0, 16, (2, 24, 8), generator=_generator).unbind())


def words_of(make: Any) -> dict[str, Any]:
    """The arguments of a script for one of the models, as texts."""
    home = "tests.session.scripts.jobs"
    data = "vectors" if make is mlp else "texts"
    names = {"model_fn": make.__name__, "dataset": data, "loss_fn": "mean_over_words", "optimizer_fn": "optimizer_fn"}
    return {role: f"{home}:{name}" for role, name in names.items()} | {"batch_size": BATCH_SIZE, "steps": NUM_STEPS}


def losses_of_one_device(make: Any, num_steps: int = NUM_STEPS, seed: int = 0) -> list[float]:
    """The losses of the same steps in plain torch: two epochs and more, each in an order of its own."""
    torch.manual_seed(0)
    model, data = make(), vectors if make is mlp else texts
    optimizer, generator, losses = optimizer_fn(model.parameters()), torch.Generator().manual_seed(seed), []
    while len(losses) < num_steps:
        for rows in torch.randperm(len(data[0]), generator=generator).split(BATCH_SIZE):
            loss = mean_over_words(model(data[0][rows]), data[1][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:num_steps]
