"""The notebook's views: the panel, the live view, pictures of tensors and plans, and the HTML report.

Nothing here runs on engines. Names load on first use, because plotly and ipywidgets are slow to import.
"""

from __future__ import annotations

from workbench.lazy import lazy_names

_HOMES = {"workbench.ui.panel": ["Panel"], "workbench.ui.runs.report": ["write_report"]}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
