"""Suggestions for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ELSEWHERE = {
    "ddp": "'*: data'",
    "fsdp": "'*: data | zero=3'",
    "dp": "'*: data', and the second of the degrees PxDxM",
    "tp": "'*: model', and the third of the degrees PxDxM",
    "tensor": "'*: model', and the third of the degrees PxDxM",
    "pp": "the preset 'pipeline', or '@1' behind a choice, and the first of the degrees PxDxM",
    "pipeline": "a preset, which is a whole strategy, or '@1' behind a choice",
    "ep": "'*: expert'",
}
"""What words of other programs, and presets, are in a strategy."""


def suggest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that begin with ``name``, else the most similar one; empty if none is similar enough.

    >>> suggest("modle", ["data", "model"]), suggest("pipe", ["data", "pipeline"]), suggest("x", ["data"])
    (['model'], ['pipeline'], [])
    """
    names = list(known)
    begun = [one for one in names if name and one.startswith(name.lower())]
    return begun or difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)


def elsewhere(word: str) -> str:
    """What to write for a word of another program, as the end of a message; empty for others.

    >>> elsewhere("FSDP"), elsewhere("tp=2"), elsewhere("data")
    ("; here 'FSDP' is '*: data | zero=3'", "; here 'tp' is '*: model', and the third of the degrees PxDxM", '')
    """
    name = word.partition("=")[0]
    meant = ELSEWHERE.get(name.lower())
    return f"; here {name!r} is {meant}" if meant else ""
