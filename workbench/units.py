"""The only place that formats bytes, seconds and counts for people: three significant digits, unit always present."""

from __future__ import annotations

from collections.abc import Sequence

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNT_UNITS = ("", "k", "M", "B", "T")


def format_number(value: float, grouping: str = "") -> str:
    """A number in three significant digits, from 100 on whole: 12.34 -> ``'12.3'``, 0.4 -> ``'0.4'``.

    >>> format_number(1234.5), format_number(1234.5, grouping=",")
    ('1234', '1,234')
    """
    magnitude = abs(value)
    if magnitude >= 99.95 or value == 0:
        return f"{value:{grouping}.0f}"
    if magnitude >= 9.995:
        return f"{value:.1f}"
    if magnitude >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3g}"


def _scale(value: float, units: tuple[str, ...]) -> tuple[float, str]:
    index = 0
    while abs(value) >= 999.5 and index < len(units) - 1:
        value /= 1000
        index += 1
    return value, units[index]


def format_bytes(size_bytes: float) -> str:
    """Bytes in decimal units: ``format_bytes(8_480_000)`` -> ``'8.48 MB'``; ``0`` -> ``'0 B'``."""
    value, unit = _scale(size_bytes, _BYTE_UNITS)
    return f"{int(value)} B" if unit == "B" else f"{format_number(value)} {unit}"


def byte_scale(largest_bytes: float) -> tuple[float, str]:
    """Divisor and unit of an axis that reaches ``largest_bytes``: ``byte_scale(3e6)`` -> ``(1e6, 'MB')``."""
    _, unit = _scale(largest_bytes, _BYTE_UNITS)
    return 1000.0 ** _BYTE_UNITS.index(unit), unit


def format_seconds(time_s: float) -> str:
    """Seconds in the unit that reads best: ``format_seconds(0.00123)`` -> ``'1.23 ms'``; 125 -> ``'2 min 5 s'``."""
    if time_s == 0:
        return "0 s"
    if abs(time_s) >= 99.95:
        minutes, seconds = divmod(round(time_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(time_s) >= 0.9995 * factor:
            return f"{format_number(time_s / factor)} {unit}"
    return f"{format_number(time_s / 1e-9)} ns"


def format_count(count: float) -> str:
    """A count: ``format_count(8_480_000)`` -> ``'8.48 M'``; ``512`` -> ``'512'``."""
    value, unit = _scale(count, _COUNT_UNITS)
    return f"{int(value)}" if not unit else f"{format_number(value)} {unit}"


def counted(count: int, noun: str) -> str:
    """How many of what: ``counted(2, "engine")`` -> ``'2 engines'``; 1 -> ``'1 engine'``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as ranges: ``format_ranks([0, 1, 2, 5])`` -> ``'0-2, 5'``."""
    parts: list[str] = []
    last = None
    for rank in sorted(ranks):
        if last is not None and rank == last + 1:
            parts[-1] = f"{parts[-1].split('-')[0]}-{rank}"
        else:
            parts.append(str(rank))
        last = rank
    return ", ".join(parts)
