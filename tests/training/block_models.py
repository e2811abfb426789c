"""Models of blocks for tests of zero=3, and what runs them on two simulated ranks."""

from __future__ import annotations

import torch
from torch import nn

import workbench as wb
from workbench.testing import run_ranks

WIDTH = 6


class Block(nn.Module):
    """A residual block with what a layer may have: a norm, weights, a scale of its own, dropout."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 9), nn.Linear(9, width)
        self.scale, self.drop = nn.Parameter(torch.full((width,), 0.7)), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x))))) * self.scale


class Chain(nn.Module):
    """A table, blocks and a head that is tied to the table."""

    def __init__(self, num_blocks=4):
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.order():
            x = block(x)
        return self.head(self.norm(x))

    def order(self):
        return self.blocks


class Twice(Chain):
    def order(self):
        return [self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[1], self.blocks[1]]


class Skipping(Chain):
    """Another block at every call: what was sent ahead is a wrong guess, and one block has no gradient."""

    count = 0

    def order(self):
        self.count += 1
        return [block for i, block in enumerate(self.blocks) if i != self.count % 4]


class Apart(Chain):
    """Parts of a block are called, and the block never is."""

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(block.norm(x)))) * (block(x) if block is self.blocks[1] else 1)
        return self.head(self.norm(x))


class Several(Chain):
    """Blocks inside of a block, tuples and dicts in between."""

    def __init__(self):
        super().__init__(2)
        self.outer = nn.ModuleList(nn.ModuleDict({"a": Block(), "b": Block()}) for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for pair in self.outer:
            x = pair["b"](pair["a"](x)) + self.blocks[0](x)
        return self.head(self.norm(x))


def made(kind):
    """A model in doubles with the weights of seed 0, the same on all ranks."""
    torch.manual_seed(0)
    return kind().double()


def freeze(model):
    """All that is not a norm or a scale: what an adapter leaves alone."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "scale" in name)


IDS = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(1))


def value(tensor):
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def on_two(program, kind=Chain, options="", precision=torch.float64):
    models = [made(kind).to(precision) for _ in range(2)]
    return run_ranks(lambda rank: program(wb.parallelize(models[rank], f"*: data | 1x2x1 zero=3 {options}")), 2)


def loss_of(model):
    return nn.functional.cross_entropy(model(IDS).flatten(0, 1).float(), IDS.flatten())


def grads_of(model):
    return [value(p.grad) for p in model.parameters()]
