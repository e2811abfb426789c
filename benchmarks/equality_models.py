"""Forty small models and data for them: twenty classic ones, twenty of ``transformers`` with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SAMPLES, CLASSES, WORDS, LENGTH = 64, 10, 64, 12
Maker = Callable[[], nn.Module]


@dataclass(frozen=True)
class Subject:
    """A model and what it is trained on; ``loss_fn`` is None where the model returns its own loss."""

    make: Maker
    data: Any
    loss_fn: Callable[[Any, Any], torch.Tensor] | None


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Noise and classes."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 3, 16, 16, generator=generator), torch.randint(
        0, CLASSES, (SAMPLES,), generator=generator
    )


def words() -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences and classes."""
    generator = torch.Generator().manual_seed(4)
    return (
        torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator),
        torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
    )


class Residual(nn.Module):
    """Two convolutions with norms and a short cut."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm(outputs)
        self.again, self.norm_again = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), norm(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) to (N, outputs, H, W)."""
        inner = F.relu(self.norm(self.conv(x)))
        return F.relu(self.norm_again(self.again(inner)) + self.short(x))


def resnet(
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d, widths: tuple[int, ...] = (8, 8, 16, 16, 32, 32)
) -> nn.Module:
    """Residual blocks of these widths, and a head."""
    blocks, inputs = [], 3
    for width in widths:
        blocks.append(Residual(inputs, width, norm))
        inputs = width
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def vgg() -> nn.Module:
    """Plain convolutions with batch norm and pooling."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def lenet() -> nn.Module:
    """Tanh and average pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.Flatten(),
        nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def mlp(depth: int, activation: type[nn.Module]) -> nn.Module:
    """Linear layers of width 64."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(768, 64)]
    for _ in range(depth):
        layers += [activation(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, activation(), nn.Linear(64, CLASSES))


def mobile() -> nn.Module:
    """Depthwise and pointwise convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 32, 1),
        nn.BatchNorm2d(32), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(32, CLASSES),
    )  # fmt: skip


class Dense(nn.Module):
    """Every layer sees what all before it have made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(3 + 8 * i), nn.ReLU(), nn.Conv2d(3 + 8 * i, 8, 3, padding=1)) for i in range(4)
        )
        self.head = nn.Linear(35, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to classes."""
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(x.mean((2, 3)))


class Unet(nn.Module):
    """Down, up, and an edge across."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.up = nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.joined, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to classes."""
        begin = F.silu(self.begin(x))
        up = self.up(F.silu(self.norm(self.down(begin))))
        return self.head(self.joined(torch.cat([begin, up], 1)).mean((2, 3)))


class Mixer(nn.Module):
    """Patches, mixed along patches and along channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.norm, self.across, self.along = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to classes."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + F.gelu(self.across(self.norm(x).transpose(1, 2))).transpose(1, 2)
        return self.head((x + F.gelu(self.along(self.norm(x)))).mean(1))


class Patches(nn.Module):
    """A vision transformer made of torch's encoder layers."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, 16, 4, stride=4), nn.Parameter(torch.randn(16, 16) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=first) for _ in range(2)
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to classes."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """An embedding and a recurrent network."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.rnn = getattr(nn, kind)(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Words to classes."""
        return self.head(self.rnn(self.words(x))[0][:, -1])


class Convolved(nn.Module):
    """Convolutions over words, with instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv = nn.Embedding(WORDS, 16), nn.Conv1d(16, 16, 3, padding=1)
        self.norm, self.head = nn.InstanceNorm1d(16, affine=True), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Words to classes."""
        return self.head(F.gelu(self.norm(self.conv(self.words(x).transpose(1, 2)))).amax(-1))


class Positions(nn.Module):
    """A small GPT that adds ``positions(arange)``, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, 0.1, F.gelu, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Words to classes."""
        x = self.words(x) + self.positions(torch.arange(LENGTH, device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


def groups(width: int) -> nn.Module:
    """A norm over groups of channels."""
    return nn.GroupNorm(4, width)


CLASSIC: dict[str, tuple[Maker, Callable[[], Any]]] = {
    "mlp": (partial(mlp, 1, nn.ReLU), images),
    "deep mlp, tanh": (partial(mlp, 8, nn.Tanh), images),
    "deep mlp, gelu": (partial(mlp, 4, nn.GELU), images),
    "lenet": (lenet, images),
    "vgg": (vgg, images),
    "resnet": (resnet, images),
    "deep resnet": (partial(resnet, widths=(8, 8, 8, 16, 16, 16, 32, 32)), images),
    "resnet, group norm": (partial(resnet, groups), images),
    "resnet, instance norm": (partial(resnet, partial(nn.InstanceNorm2d, affine=True)), images),
    "mobile": (mobile, images),
    "dense": (Dense, images),
    "u-net": (Unet, images),
    "mixer": (Mixer, images),
    "vit, norm first": (partial(Patches, True), images),
    "vit, norm last": (partial(Patches, False), images),
    "lstm": (partial(Recurrent, "LSTM"), words),
    "gru": (partial(Recurrent, "GRU"), words),
    "rnn": (partial(Recurrent, "RNN"), words),
    "convolved words": (Convolved, words),
    "gpt with positions": (Positions, words),
}

_SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CAUSAL = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "phi3", "gpt_neox", "olmo2", "stablelm", "starcoder2", "gpt2",
    "opt",
)  # fmt: skip
MASKED = ("bert", "distilbert", "roberta", "electra", "albert", "mobilebert", "mpnet")
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "gemma": {"head_dim": 8},
    "qwen3": {"head_dim": 8},
    "electra": {"embedding_size": 32},
    "albert": {"embedding_size": 16},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "roberta": {"max_position_embeddings": 40},
    "mpnet": {"max_position_embeddings": 40},
}


def transformer(kind: str) -> nn.Module:
    """A model of ``transformers`` of a kind, small, with random weights, in training mode."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    heads = {} if kind in MASKED else {"num_key_value_heads": 2}
    config = hf.AutoConfig.for_model(kind, **(_SIZES | heads | _OWN_SIZES.get(kind, {})))
    config.use_cache = False
    auto = hf.AutoModelForMaskedLM if kind in MASKED else hf.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="eager").train()


def sentences() -> dict[str, torch.Tensor]:
    """Words, labels, and a mask with padding at the end of some sentences."""
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[::3, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def subjects() -> dict[str, Subject]:
    """All of them, by name."""
    found = {name: Subject(make, data(), F.cross_entropy) for name, (make, data) in CLASSIC.items()}
    return found | {kind: Subject(partial(transformer, kind), sentences(), None) for kind in (*CAUSAL, *MASKED)}
