"""Texts of numbers that are neither bytes nor seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.units import format_number

DASH = "\u2013"
NOT_CHECKED = "unchecked"
"""The difference of a run that was not compared with one device."""
TIMES = "\u00d7"
MINUS = "\u2212"


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


def three_digits(number: float) -> str:
    """Three significant digits or more: 17.62 -> ``'17.6'``, 28123 -> ``'28\u202f123'``, 4.123e-5 -> ``'4.12e-05'``."""
    return format_number(number, grouping=",").replace(",", "\u202f")


def short_number(number: float) -> str:
    """A round number beside an axis: 12000 -> ``'12k'``, 0.25 -> ``'0.25'``."""
    return f"{number / 1000:g}k" if abs(number) >= 10_000 else f"{number:g}"


def from_to(ascending: Sequence[object]) -> str:
    """The first and the last of some values: ``'3 to 10'``, ``'3'`` where both read the same; empty without any."""
    return " to ".join(dict.fromkeys(map(str, [*ascending[:1], *ascending[-1:]])))


def signed_percent(share: float) -> str:
    """A relative difference: 0.031 -> ``'+3 %'``, with a true minus."""
    percent = round(100 * share)
    sign = MINUS if percent < 0 else "+" if percent > 0 else ""
    return f"{sign}{abs(percent)} %"


def percent(share: float) -> str:
    """A share: 0.25 -> ``'25 %'``."""
    return f"{100 * share:.0f} %"


def speedup_text(speedup: float) -> str:
    """``'1.25\u00d7'``."""
    return f"{speedup:.2f}{TIMES}"
