"""Progress bars of tqdm on engines are text: one output that changes for all ranks, also in a terminal or a file."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_NAMES = {"tqdm": "tqdm", "trange": "trange", "tqdm_notebook": "tqdm", "tnrange": "trange"}


class TextBars(ModuleType):
    """Stands in for a module of tqdm with widgets; tqdm itself is loaded when a cell asks for it."""

    __all__ = tuple(_NAMES)

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from tqdm import std  # type: ignore[import-untyped]

        return getattr(std, _NAMES[name])


def install() -> None:
    """Have ``tqdm.auto`` and ``tqdm.notebook`` mean bars of text, if nobody has loaded them yet."""
    for name in ("tqdm.autonotebook", "tqdm.notebook"):
        sys.modules.setdefault(name, TextBars(name))
