"""The live figure in a page. Importing this takes two seconds, which go into plotly's widget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import plotly.graph_objects as go

_CONFIG = {
    "displaylogo": False,
    "displayModeBar": "hover",
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
}
_MAX_TIMES_LOST = 3
"""A page that shows nothing, however often it is told, must not keep the kernel busy."""


class LiveWidget(go.FigureWidget):
    """A FigureWidget that tells a page which comes later, or comes back, what has been drawn since.

    Plotly sends changes as messages and leaves the traits that a page asks for as they were in the beginning: after a
    reload the figure would be empty, and so it would where it is shown in another place. Change it inside
    ``batch_update``, so that no page gets it half drawn.

    Args:
        draw_anew: called when a page has drawn it for the first time, as what was sent while the page still loaded the
            figure's script is lost to it; and when a page shows nothing of a trace that has points.
    """

    def __init__(self, figure: go.Figure, draw_anew: Callable[[], None]) -> None:
        self._drawing, self._draw_anew = threading.RLock(), draw_anew
        self._is_made, self._is_drawn, self._times_lost = False, False, 0
        super().__init__(figure)
        self.observe(self._on_drawn, "_js2py_traceDeltas")
        self._config = self._config | _CONFIG  # type: ignore[has-type] # plotly's own
        self._is_made = True
        self.open()

    def open(self) -> None:
        """Tell the page of the figure when it is complete. Plotly would tell it of an empty one, and of the traces with
        the next message: a page that misses that one has no traces that later ones could change.
        """
        if self._is_made:
            super().open()

    def _on_drawn(self, change: Any) -> None:
        """A page says what it has drawn, after each update and where it shows the figure anew; what ``None`` tells is
        that this was taken in.
        """
        report = change["new"]
        if report is None:
            return
        is_lost = self._is_lost(report)
        self._times_lost = self._times_lost + 1 if is_lost else 0
        if not self._is_drawn or (is_lost and self._times_lost <= _MAX_TIMES_LOST):
            self._is_drawn = True
            self._draw_anew()

    def _is_lost(self, report: dict[str, Any]) -> bool:
        """Does the page hide, as plotly does with what is empty, a trace that has points? If more is on its way, ask
        later.
        """
        if report["trace_edit_id"] != self._last_trace_edit_id:
            return False
        hidden = {trace["uid"] for trace in report["trace_deltas"] if trace.get("visible") is False}
        return any(trace.uid in hidden and _num_points(trace) > 0 for trace in self.data)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take in what a page says, and draw nothing meanwhile: traits hold back what changes while some are set, and
        an update that another thread sends and takes back then is one that no page ever gets.
        """
        with self._drawing:
            super().set_state(sync_data)

    @contextmanager
    def batch_update(self) -> Iterator[None]:
        """Changes inside are sent together, and no page is told of some of them only."""
        with self._drawing, super().batch_update():
            yield

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """What a page is told; all of it as it stands now where no ``key`` names a part."""
        with self._drawing:
            if key is None and self._trait_values.get("_widget_data"):
                self._trait_values |= {"_widget_data": self._data, "_widget_layout": self._layout}
            return dict(super().get_state(key, drop_defaults))


def _num_points(trace: Any) -> int:
    return min((len(values) if values is not None else 0) for values in (trace.x, trace.y))
