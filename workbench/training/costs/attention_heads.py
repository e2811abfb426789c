"""The number of heads of a model's attention, so that no rank gets a part of one."""

from __future__ import annotations

from torch import nn

HEADS = (
    "num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "encoder_attention_heads",
    "decoder_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
)  # fmt: skip
"""Names under which modules and their configurations keep it: torch's, those of transformers, and usual ones."""


def heads_of(module: nn.Module) -> set[int]:
    """All numbers of heads that the parts of a module, or their configurations, name.

    >>> heads_of(nn.TransformerEncoderLayer(16, 4, 32))
    {4}
    """
    places = [place for part in module.modules() for place in (part, getattr(part, "config", None))]
    found = (getattr(place, name, None) for place in places if place is not None for name in HEADS)
    return {number for number in found if isinstance(number, int) and not isinstance(number, bool) and number > 0}
