"""Small models made of what the models of ``runs`` have not: recurrent cells, decoders, transposed convolutions, gates.

Layers stand in the order in which they are called, so that stages cut in this order have no edge that goes back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

NUM_WORDS, LENGTH, NUM_FEATURES, NUM_CLASSES = 11, 6, 12, 10


def inputs_of(kind: str, num_samples: int, generator: torch.Generator) -> torch.Tensor:
    """Words (samples, 6), features (samples, 12) or images (samples, 1, 8, 8)."""
    if kind == "words":
        return torch.randint(0, NUM_WORDS, (num_samples, LENGTH), generator=generator)
    shape = (NUM_FEATURES,) if kind == "features" else (1, 8, 8)
    return torch.randn(num_samples, *shape, generator=generator, dtype=torch.float64)


class Recurrent(nn.Module):
    """A bidirectional LSTM of two layers behind an embedding with a padding word."""

    takes = "words"

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 8, padding_idx=0)
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.words(x))[0][:, -1])


class CellInALoop(nn.Module):
    """A GRU cell called word by word; where it begins is a parameter."""

    takes = "words"

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Parameter(torch.zeros(8))
        self.words, self.cell, self.head = nn.Embedding(NUM_WORDS, 8), nn.GRUCell(8, 8), nn.Linear(8, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words, state = self.words(x), self.begin.expand(x.shape[0], -1)
        for position in range(x.shape[1]):
            state = self.cell(words[:, position], state)
        return self.head(state)


class EncoderAndDecoder(nn.Module):
    """torch's own transformer layers, with padding and causal masks; norms before and behind."""

    takes = "words"

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(LENGTH, 8) * 0.1)
        self.words = nn.Embedding(NUM_WORDS, 8)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=first) for first in (False, True)
        )
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_padding = (x == 0) & (torch.arange(LENGTH) > 0)
        begin = self.words(x) + self.positions
        memory = begin
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=is_padding)
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=begin.dtype)
        hidden = begin
        for layer in self.decoder:
            hidden = layer(hidden, memory, tgt_mask=causal, memory_key_padding_mask=is_padding)
        return self.head(hidden.mean(1))


class DownAndUp(nn.Module):
    """Convolutions down and up with an edge over both; group norm, batch norm, grouped and transposed convolutions."""

    takes = "images"

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.begin_norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down, self.down_norm = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.middle, self.up = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.joined, self.head = nn.Conv2d(8, 4, 1), nn.Linear(4, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = F.silu(self.begin_norm(self.begin(x)))
        down = F.gelu(self.down_norm(self.down(begin)))
        up = self.up(down + self.middle(down))
        return self.head(self.joined(torch.cat([begin, up], 1)).mean((2, 3)))


class Mobile(nn.Module):
    """Depthwise convolutions, instance norm, batch norm of another momentum, squeeze and excite."""

    takes = "images"

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.norm = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8, momentum=0.3)
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 12, 1)
        self.instance, self.pool = nn.InstanceNorm2d(12, affine=True), nn.AdaptiveAvgPool2d(1)
        self.squeeze, self.excite, self.head = nn.Linear(12, 6), nn.Linear(6, 12), nn.Linear(12, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.instance(self.pointwise(self.depthwise(F.hardswish(self.norm(self.begin(x))))))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(self.pool(x).flatten(1)))))
        return self.head(self.pool(x * gate[:, :, None, None]).flatten(1))


class Patches(nn.Module):
    """A word of its own before the patches of an image, attention with weights, a buffer that counts."""

    takes = "images"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.patches, self.norm = nn.Conv2d(1, 8, 4, stride=4), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8))
        self.head = nn.Linear(8, NUM_CLASSES)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=True)[0]
        if self.training:
            self.num_calls.add_(1)
        return self.head((x + self.mlp(x))[:, 0])


class Dilated(nn.Module):
    """Causal convolutions with gates, whose skips meet at the end."""

    takes = "features"

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Conv1d(1, 8, 1)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"gated": nn.Conv1d(8, 16, 2, dilation=dilation), "skip": nn.Conv1d(8, 8, 1)})
            for dilation in (1, 2, 4)
        )
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = self.begin(x[:, None]), 0
        for block in self.blocks:
            hidden = F.glu(block["gated"](F.pad(x, (*block["gated"].dilation, 0))), 1)
            x, total = x + hidden, total + block["skip"](hidden)
        return self.head(F.relu(total).amax(2))


class Normed(nn.Module):
    """Weights that are computed, a slope per channel, a scale without dims."""

    takes = "features"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first, self.second, self.slopes = weight_norm(nn.Linear(NUM_FEATURES, 16)), nn.Linear(16, 16), nn.PReLU(16)
        self.norm, self.head = nn.RMSNorm(16), weight_norm(nn.Linear(16, NUM_CLASSES, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.slopes(self.second(F.relu(self.first(x)))))) * self.scale


class ThereAndBack(nn.Module):
    """A weight that is used again, transposed, outside of its layer."""

    takes = "features"

    def __init__(self) -> None:
        super().__init__()
        self.there, self.middle = nn.Linear(NUM_FEATURES, 16), nn.Linear(16, 16)
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.there(x))
        hidden = hidden + torch.sigmoid(self.middle(hidden))
        return self.head(F.linear(hidden, self.there.weight.t()) + x)


class Twice(nn.Module):
    """One encoder for two halves of a sample, and a bilinear layer over both."""

    takes = "features"

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(NUM_FEATURES // 2, 16), nn.ELU(), nn.Linear(16, 8))
        self.both, self.head = nn.Bilinear(8, 8, 8), nn.Linear(8, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = (self.encoder(half) for half in x.chunk(2, 1))
        return self.head(F.softplus(self.both(a, b)) + a * b)


class Experts(nn.Module):
    """Three experts of which the best two count."""

    takes = "features"

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(NUM_FEATURES, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.GELU(), nn.Linear(16, NUM_FEATURES)) for _ in range(3)
        )
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = F.softmax(self.gate(x), -1).topk(2)
        for number, expert in enumerate(self.experts):
            x = x + expert(x) * ((chosen == number) * weights).sum(-1, keepdim=True)
        return self.head(x)


class Bag(nn.Module):
    """Means of words."""

    takes = "words"

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.EmbeddingBag(NUM_WORDS, 12, mode="mean"), nn.LayerNorm(12, elementwise_affine=False)
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.leaky_relu(self.hidden(self.norm(self.words(x)))))


MODELS = {
    model.__name__: model
    for model in (
        Recurrent, CellInALoop, EncoderAndDecoder, DownAndUp, Mobile, Patches,
        Dilated, Normed, ThereAndBack, Twice, Experts, Bag,
    )
}  # fmt: skip
