"""The notebook's views: the panel, the live view, pictures of tensors and plans, and the HTML report.

Nothing here runs on engines. Names load on first use, because plotly and ipywidgets are slow to import.
"""

from __future__ import annotations

from typing import Any

from workbench.lazy import lazy_names

_HOMES = {"workbench.ui.panel": ["Panel"], "workbench.ui.runs.report": ["write_report"]}

_find, __dir__, __all__ = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    return _find(name)
