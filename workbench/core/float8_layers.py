"""Which layers the option ``fp8`` lets multiply in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.core.layout import Shape
from workbench.core.rows import Layer
from workbench.core.weight_splits import TRANSPOSED_KINDS

KINDS = ("Linear", *TRANSPOSED_KINDS)
MULTIPLE = 16
"""GPUs multiply 8 bits in blocks of so many numbers. A layer of other sizes stays in 16 bits, on every device."""


def fits_float8(weight: Shape) -> bool:
    """Whether a linear layer with a weight of this logical shape multiplies in 8 bits.

    >>> fits_float8((64, 32)), fits_float8((65, 32))
    (True, False)
    """
    return len(weight) == 2 and not any(size % MULTIPLE for size in weight)


def multiplies_in_8_bits(layer: Layer) -> bool:
    """Whether it is a linear layer whose sizes fit."""
    return layer.kind in KINDS and fits_float8(layer.shapes.get("weight", ()))


def left_in_16_bits(layers: Iterable[Layer]) -> list[Layer]:
    """The linear layers whose sizes do not fit.

    >>> [layer.name for layer in left_in_16_bits([Layer("head", "Linear", {"weight": (65, 32)})])]
    ['head']
    """
    return [layer for layer in layers if layer.kind in KINDS and not multiplies_in_8_bits(layer)]
