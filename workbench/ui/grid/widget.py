"""The layer grid as one widget: Python sends the view, the script sends the user's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from workbench.theme import style_sheet
from workbench.ui.assets import asset
from workbench.ui.failures import guarded

SCRIPTS = ("draw_cells.js", "draw_grid.js", "controls.js", "panel_page.js", "grid.js")
STYLES = ("panel.css", "grid.css", "predictions.css", "plan.css")
PANEL_CLASS = "wb-panel"


class LayerGrid(anywidget.AnyWidget):
    """Draws ``view`` (see ``workbench.ui.grid.view.grid_view``) and passes the user's events to one handler.

    The handler gets plain dictionaries, ``{"event": "choice", "rows": ["fc1"], "value": "model"}``. All rows share
    one widget, because a widget per control would send hundreds of messages for a deep model.
    """

    _esm = "".join(map(asset, SCRIPTS))  # one module: widgets cannot import their neighbours
    _css = style_sheet(f".{PANEL_CLASS}") + "".join(map(asset, STYLES))

    view = traitlets.Dict().tag(sync=True)

    def __init__(self, on_event: Callable[[dict[str, Any]], None], **traits: Any) -> None:
        super().__init__(**traits)
        self._on_event = on_event
        self.on_msg(guarded(self._receive))

    def _receive(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        self._on_event(content)
