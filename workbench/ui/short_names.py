"""Names beside plots. The name of a strategy is its text, which is too long for a plot."""

from __future__ import annotations

from collections.abc import Sequence


def short_name(name: str, head: int = 16, tail: int = 12) -> str:
    """A name without its middle, if it is longer than ``head`` and ``tail`` together.

    >>> short_name("fc1: data; fc2: data@1; fc3: data@1 | 2x1x1 mb=4 1f1b")
    'fc1: data; fc2: \u2026x1 mb=4 1f1b'
    """
    return name if len(name) <= head + tail + 1 else f"{name[:head]}\u2026{name[-tail:]}"


def short_names(names: Sequence[str]) -> list[str]:
    """Short names that differ: equal ones are numbered.

    >>> short_names(["data", "model", "data"])
    ['data (1)', 'model', 'data (2)']
    """
    short = [short_name(name) for name in names]
    return [
        name if short.count(name) == 1 else f"{name} ({short[: place + 1].count(name)})"
        for place, name in enumerate(short)
    ]
