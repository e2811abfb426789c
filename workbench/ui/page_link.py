"""Messages between Python and the page: theme, width and visibility come in, downloads go out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget

from workbench import theme
from workbench.theme import Palette
from workbench.ui.assets import asset
from workbench.ui.failures import guarded


class Downloads(anywidget.AnyWidget):
    """A widget whose script has ``download.js``."""

    def download(self, name: str, content: str, mime_type: str = "text/plain") -> None:
        """Let the browser save a file of that name."""
        self.send({"event": "download", "name": name, "type": mime_type}, buffers=[content.encode()])


class PageLink(Downloads):
    """An empty element that reports the page's theme, the panel's width and its visibility, and downloads files.

    Args:
        on_theme: gets the palette when a page shows the view, and whenever its theme changes.
        on_width: gets the panel's width in pixels, whenever that changes.
        on_visible: gets whether the view can be seen, whenever that changes, and when a page shows it anew.
        on_view: gets the name of each view in a page, at least once.
    """

    _esm = asset("controls.js") + asset("download.js") + asset("page_link.js")
    _css = asset("runs.css")

    def __init__(
        self,
        on_theme: Callable[[Palette], None] = lambda colours: None,
        on_width: Callable[[float], None] = lambda pixels: None,
        on_visible: Callable[[bool], None] = lambda seen: None,
        on_view: Callable[[str], None] = lambda view: None,
        **traits: Any,
    ) -> None:
        super().__init__(**traits)
        self._on_theme, self._on_width, self._on_visible, self._on_view = on_theme, on_width, on_visible, on_view
        self._asked = self._answered = 0
        self._asked_s = 0.0
        self._has_page = False
        self._seen_in: set[str] = set()
        self.on_msg(guarded(self._receive))

    def ask(self, now_s: float) -> None:
        """Ask the page to answer when it has drawn the messages so far."""
        if self._has_page:
            self._asked += 1
            self._asked_s = now_s
            self.send({"event": "ping", "number": self._asked})

    def is_behind(self, now_s: float, timeout_s: float) -> bool:
        """Whether the page still draws earlier messages. After ``timeout_s`` seconds without an answer: False."""
        return self._answered < self._asked and now_s - self._asked_s < timeout_s

    def _receive(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        self._has_page = True
        if content.get("event") == "pong":
            self._answered = max(self._answered, int(content["value"]))
        if content.get("event") == "theme":
            self._on_theme(theme.palette(str(content["value"])))
        elif content.get("event") == "width":
            self._on_width(float(content["value"]))
        elif content.get("event") == "visible":
            view = str(content.get("view", ""))
            (self._seen_in.add if content["value"] else self._seen_in.discard)(view)
            self._on_view(view)
            self._on_visible(bool(self._seen_in))
