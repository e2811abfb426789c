"""Suggestions for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that begin with ``name``, else the most similar one; empty if none is similar enough.

    >>> suggest("modle", ["data", "model"]), suggest("pipe", ["data", "pipeline"]), suggest("x", ["data"])
    (['model'], ['pipeline'], [])
    """
    names = list(known)
    begun = [one for one in names if name and one.startswith(name.lower())]
    return begun or difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
