"""A GPT in plain torch that several benchmarks train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length, width), as ``x``."""
        q, k, v = (self._heads(part) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_size).transpose(1, 2)


class GPT(nn.Module):
    """Words and positions, blocks, and a head over the words.

    Args:
        width: of the residual stream; a head of attention is 32 wide.
        num_blocks: how many.
        num_words: size of the vocabulary.
        length: the longest text.
    """

    def __init__(self, width: int, num_blocks: int, num_words: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(num_words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 32) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """(batch, length) -> scores (batch, length, words)."""
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_word_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy; targets are (batch, length)."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())
