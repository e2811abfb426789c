"""How the pages write numbers that are neither bytes nor seconds."""

from __future__ import annotations

import math

DASH = "\u2013"
TIMES = "\u00d7"


def short_difference(difference: float | None) -> str:
    """One significant digit: ``'2e-7'``; exactly zero is ``'0'``, unknown a dash, others as they print.

    >>> short_difference(2.4e-07)
    '2e-7'
    """
    if difference is None:
        return DASH
    if difference == 0:
        return "0"
    if not math.isfinite(difference):
        return str(difference)
    mantissa, exponent = f"{difference:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def grouped(number: float) -> str:
    """A whole number with narrow spaces between thousands: ``grouped(28123.4)`` -> ``'28\u202f123'``."""
    return f"{number:,.0f}".replace(",", "\u202f")


def speedup_text(speedup: float | None) -> str:
    """``'1.25\u00d7'``, or a dash where it is unknown."""
    return DASH if speedup is None else f"{speedup:.2f}{TIMES}"
