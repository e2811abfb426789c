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


class LiveWidget(go.FigureWidget):
    """A FigureWidget that tells a page which comes later, or comes back, what has been drawn since.

    Plotly sends changes as messages and leaves the traits that a page asks for as they were in the beginning: after a
    reload the figure would be empty. Change it inside ``batch_update``, so that no page gets it half drawn.

    Args:
        on_page: called when a page has drawn it for the first time. What was sent while the page still loaded the
            figure's script is lost to it.
    """

    def __init__(self, figure: go.Figure, on_page: Callable[[], None]) -> None:
        self._drawing, self._on_page = threading.RLock(), on_page
        super().__init__(figure)
        self.observe(self._on_drawn, "_js2py_traceDeltas")
        self._config = self._config | _CONFIG  # type: ignore[has-type] # plotly's own

    def _on_drawn(self, change: Any) -> None:
        """A page says what it has drawn; what ``None`` tells is that this was taken in."""
        if change["new"] is not None:
            self.unobserve(self._on_drawn, "_js2py_traceDeltas")
            self._on_page()

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
