"""Small plain torch models: nothing in them knows of ranks."""

from __future__ import annotations

import copy
import itertools
import threading

import torch
import torch.nn.functional as F
from torch import nn

_lock = threading.Lock()  # the default generator is shared by simulated ranks
_made: dict[str, nn.Module] = {}


class CNN(nn.Module):
    """Two convolutions with batch norm, in-place activation, two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc1, self.fc2 = nn.Linear(8 * 4, 16), nn.Linear(16, 10)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = F.max_pool2d(self.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Encoder(nn.Module):
    """torch's own transformer encoder."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.inp, self.enc = nn.Linear(4, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.enc(self.inp(x)).mean(1))


class Attention(nn.Module):
    """Embedding, causal attention with heads, a residual, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.tok, self.norm = nn.Embedding(10, 16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids)
        y = self.norm(x)
        batch, length, _ = y.shape
        q, k, v = (part(y).view(batch, length, -1, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        return self.head((x + self.o(y)).mean(1))


class ScaledTable(nn.Embedding):
    """Scales its rows, as tables of many encoders and decoders do."""

    def forward(self, ids):
        return super().forward(ids) * 2.5


class ShiftedTable(nn.Embedding):
    """Positions, behind two rows that are reserved; takes the ids of words."""

    def forward(self, ids):
        return super().forward(torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) + 2)


class OffsetTable(nn.Embedding):
    """Adds a vector of its own to its rows."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.offset = nn.Parameter(torch.linspace(-1, 1, sizes[1]))

    def forward(self, ids):
        return super().forward(ids) + self.offset


class OwnTable(nn.Module):
    """A table that is no ``nn.Embedding``."""

    def __init__(self, num_rows, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_rows, width))

    def forward(self, ids):
        return F.embedding(ids, self.weight) * 2.5


class TiedTable(nn.Module):
    """A table, positions, a layer, and a head with the table's weight."""

    def __init__(self, table):
        super().__init__()
        self.words, self.places = table(10, 16), ShiftedTable(12, 16)
        self.fc = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.fc(self.words(ids) + self.places(ids))).mean(1))


class Skip(nn.Module):
    """A skip edge over two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        x = torch.tanh(self.a(x))
        y = torch.tanh(self.c(torch.tanh(self.b(x)))) + x
        return self.head(torch.relu(self.d(y)) + 0.5 * x)


class Dropping(nn.Module):
    """Dropout between linear layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 10)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = self.drop(torch.relu(self.a(x)))
        return self.head(self.drop(torch.relu(self.b(x))))


class Centred(nn.Module):
    """A linear layer less the running mean of its outputs: a forward reads what the one before has written."""

    def __init__(self, size, is_replaced):
        super().__init__()
        self.linear, self.is_replaced = nn.Linear(size, size), is_replaced
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x):
        y = self.linear(x)
        if self.is_replaced:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        else:
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return torch.tanh(y - self.mean)


def remembering() -> nn.Sequential:
    """Blocks whose forwards depend on buffers that they write: spectral norms (both of torch's) and running means."""
    norms = nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm
    spectral = [nn.Sequential(norm(nn.Linear(12, 12)), nn.Tanh()) for norm in norms]
    return nn.Sequential(*spectral, Centred(12, is_replaced=False), Centred(12, is_replaced=True), nn.Linear(12, 10))


def mlp() -> nn.Sequential:
    """Four linear layers."""
    sizes = [16, 32, 24, 20, 10]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


MODELS = {
    "mlp": mlp,
    "cnn": CNN,
    "encoder": Encoder,
    "attention": Attention,
    "scaled table": lambda: TiedTable(ScaledTable),
    "offset table": lambda: TiedTable(OffsetTable),
    "own table": lambda: TiedTable(OwnTable),
    "skip": Skip,
    "dropping": Dropping,
    "remembering": remembering,
}


def make(kind: str) -> nn.Module:
    """A model with the weights of seed 0."""
    with _lock:
        if kind not in _made:
            torch.manual_seed(0)
            _made[kind] = MODELS[kind]()
        return copy.deepcopy(_made[kind])


def batch_for(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels; the number of samples is odd."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"mlp": (23, 16), "cnn": (23, 1, 8, 8), "encoder": (23, 5, 4)}
    if kind == "attention" or kind.endswith("table"):
        inputs = torch.randint(0, 10, (23, 5), generator=generator)
    else:
        inputs = torch.randn(shapes.get(kind, (23, 12)), generator=generator)
    return inputs, torch.randint(0, 10, (23,), generator=generator)
