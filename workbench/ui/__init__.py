"""The notebook's views: the panel, the live view, pictures of tensors and plans, and the HTML report.

Nothing here runs on engines. Names load on first use, because plotly and ipywidgets are slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"Panel": "workbench.ui.panel", "write_report": "workbench.ui.runs.report"}

__all__ = ["Panel", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
