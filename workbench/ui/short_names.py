"""Names beside plots. The name of a strategy is its text, which is too long for a plot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

_CUT = "\u2026"


def short_name(name: str, head: int = 16, tail: int = 12) -> str:
    """A name without its middle, if it is longer than ``head`` and ``tail`` together. It ends with whole words, unless
    the first of them would leave hardly anything of the beginning.

    >>> short_name("fc1: data; fc2: data@1; fc3: data@1 | 2x1x1 mb=4 1f1b")
    'fc1: data; fc\u20262x1x1 mb=4 1f1b'
    """
    length = head + tail
    if len(name) <= length + 1:
        return name
    words = len(name) - name.rfind(" ", 0, len(name) - tail) - 1
    tail = words if words <= tail + head // 2 else tail
    return f"{name[: length - tail]}{_CUT}{name[-tail:]}"


def _from_word(name: str, at: int, head: int = 7, tail: int = 19) -> str:
    """A short name with the word at ``at``, and what follows it."""
    start = name.rfind(" ", 0, at) + 1
    if start <= head or at >= len(name):
        return short_name(name)
    rest = name[start:]
    return f"{name[:head]}{_CUT}{rest if len(rest) <= tail + 1 else rest[:tail] + _CUT}"


def short_names(names: Sequence[str]) -> list[str]:
    """Short names that differ: those that would be alike show where they part, and equal ones are numbered.

    >>> short_names(["data", "model", "data"])
    ['data (1)', 'model', 'data (2)']
    >>> short_names([f"*: model; head: data | 2x1x2 mb={n} zero=2 recompute=attention" for n in (2, 4)])
    ['*: mode\u2026mb=2 zero=2 recompu\u2026', '*: mode\u2026mb=4 zero=2 recompu\u2026']
    """
    short = [short_name(name) for name in names]
    for alike in {name for name in short if short.count(name) > 1}:
        places = [place for place, name in enumerate(short) if name == alike]
        letters = zip_longest(*(names[place] for place in places))
        start = next((at for at, here in enumerate(letters) if len(set(here)) > 1), 0)
        for place in places:
            short[place] = _from_word(names[place], start)
    return [
        name if short.count(name) == 1 else f"{name} ({short[: place + 1].count(name)})"
        for place, name in enumerate(short)
    ]
