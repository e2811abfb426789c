"""Transformers of published sizes, by name."""

from __future__ import annotations

from workbench.core.suggest import suggest
from workbench.cost.transformer import Transformer
from workbench.errors import StrategyError

TRANSFORMERS = {
    "gpt2": Transformer(768, 12, 12, 50304, 1024),
    "gpt3-6.7b": Transformer(4096, 32, 32, 51200, 2048),
    "gpt3-13b": Transformer(5120, 40, 40, 51200, 2048),
    "gpt3-175b": Transformer(12288, 96, 96, 51200, 2048),
    "llama2-7b": Transformer(4096, 32, 32, 32000, 4096, 32, 11008, is_gated=True, has_flash=True),
    "llama2-13b": Transformer(5120, 40, 40, 32000, 4096, 40, 13824, is_gated=True, has_flash=True),
    "llama2-70b": Transformer(8192, 64, 80, 32000, 4096, 8, 28672, is_gated=True, has_flash=True),
    "llama3-8b": Transformer(4096, 32, 32, 128256, 8192, 8, 14336, is_gated=True, has_flash=True),
    "llama3-70b": Transformer(8192, 64, 80, 128256, 8192, 8, 28672, is_gated=True, has_flash=True),
    "llama3-405b": Transformer(16384, 128, 126, 128256, 8192, 8, 53248, is_gated=True, has_flash=True),
}
"""The vocabulary is padded to a multiple of 64 or 128, for programs that split the embedding.
Sources: arXiv 2005.14165 (GPT-3),
2307.09288 (Llama 2), 2407.21783 (Llama 3), and the configuration of GPT-2."""


def transformer_by_name(name: str) -> Transformer:
    """A published transformer by name.

    Raises:
        StrategyError: no such name.
    """
    if name not in TRANSFORMERS:
        near = suggest(name, TRANSFORMERS)
        hint = f" Do you mean {' or '.join(map(repr, near))}?" if near else ""
        raise StrategyError(f"{name!r} is none of the known transformers: {', '.join(TRANSFORMERS)}.{hint}")
    return TRANSFORMERS[name]
