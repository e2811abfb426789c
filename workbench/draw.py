"""Pictures: who holds what, products, networks, boxings, stages, timelines, memory, finished runs.

``wb.draw.timeline(wb.debug.timeline(model))`` draws the last step of a pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.lazy import lazy_names

if TYPE_CHECKING:
    from workbench.session.comparison.saved_runs import SavedRuns as SavedRuns
    from workbench.ui.pictures.boxing import draw_boxing
    from workbench.ui.pictures.matmul import draw_matmul
    from workbench.ui.pictures.memory import draw_memory
    from workbench.ui.pictures.network import draw_network
    from workbench.ui.pictures.stages import draw_stages
    from workbench.ui.pictures.timeline import draw_timeline
    from workbench.ui.runs.runs_view import show_runs

    boxing, matmul, memory, network, runs = draw_boxing, draw_matmul, draw_memory, draw_network, show_runs
    stages, timeline = draw_stages, draw_timeline

_HOMES = {
    "workbench.session.comparison.saved_runs": ["SavedRuns"],
    "workbench.ui.pictures.boxing": ["boxing=draw_boxing"],
    "workbench.ui.pictures.matmul": ["matmul=draw_matmul"],
    "workbench.ui.pictures.memory": ["memory=draw_memory"],
    "workbench.ui.pictures.network": ["network=draw_network"],
    "workbench.ui.pictures.stages": ["stages=draw_stages"],
    "workbench.ui.pictures.timeline": ["timeline=draw_timeline"],
    "workbench.ui.runs.runs_view": ["runs=show_runs"],
}

if not TYPE_CHECKING:  # type checkers would take every name
    __getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
