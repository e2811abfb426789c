"""Values of steps beside the loss: learning rate, gradient norm, tokens per second, and what a user reports by name.

A step need not have all of them, so they are pairs of a step's number, from 0, and a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Pairs = tuple[tuple[int, float], ...]
LEARNING_RATE, GRADIENT_NORM, TOKENS_PER_S, MFU = "learning_rate", "gradient_norm", "tokens_per_s", "mfu"
UNKNOWN_NORM = -1.0
"""In the place of a gradient norm that a rank has not measured."""


def whole_norms(first_step: int, by_rank: Sequence[Sequence[float]]) -> Pairs:
    """The norms of all gradients from the norms of the ranks' parts, for steps that all ranks have measured.

    >>> whole_norms(4, [(3.0, 1.0), (4.0, UNKNOWN_NORM)])
    ((4, 5.0),)
    """
    steps = enumerate(zip(*by_rank, strict=True), first_step)
    return tuple((step, math.hypot(*parts)) for step, parts in steps if UNKNOWN_NORM not in parts)


def rates(first_step: int, amounts: Sequence[float], times_s: Sequence[float], unit: float = 1.0) -> Pairs:
    """Amounts per second, in units of ``unit``, for steps whose amount and time are known.

    >>> rates(0, [512, 512], [0.0, 0.25])
    ((1, 2048.0),)
    """
    steps = enumerate(zip(amounts, times_s, strict=True), first_step)
    return tuple((step, amount / time_s / unit) for step, (amount, time_s) in steps if amount and time_s > 0)


def known(values: Mapping[str, Pairs]) -> dict[str, Pairs]:
    """The names that have a value."""
    return {name: pairs for name, pairs in values.items() if pairs}
