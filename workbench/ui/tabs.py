"""The bar that stays in sight at the top of the panel: its tabs, and the button that opens the legend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from workbench.ui.assets import asset
from workbench.ui.legend import legend_html

TABS = {"strategy": "Strategy", "live": "Live", "compare": "Compare"}


class Tabs(anywidget.AnyWidget):
    """Chooses which part of the panel is shown. The page changes it at once, also while the kernel is busy.

    Parts are widgets in the same panel with the class ``wb-tab`` and that of their tab, ``tab_class("live")``. A click
    on Run shows the live part, with the word "starting", until ``num_answers`` changes.

    Args:
        on_visible: gets whether a page shows the bar.

    Attributes:
        chosen: the tab that is shown, also in a page that opens later.
        names: the text of each tab.
    """

    _esm = asset("controls.js") + asset("tabs.js")
    _css = asset("tabs.css")

    chosen = traitlets.Enum(list(TABS), "strategy").tag(sync=True)
    names = traitlets.Dict(TABS).tag(sync=True)
    num_answers = traitlets.Int(0).tag(sync=True)
    legend = traitlets.Unicode(legend_html()).tag(sync=True)

    def __init__(self, on_visible: Callable[[bool], None] = lambda seen: None, **traits: Any) -> None:
        super().__init__(**traits)
        self._on_visible = on_visible
        self._seen_in: set[str] = set()
        self.on_msg(self._receive)

    def show_counts(self, num_runs: int) -> None:
        """Show on the tab the number of runs to compare."""
        self.names = TABS | ({"compare": f"{TABS['compare']} ({num_runs})"} if num_runs else {})

    def _receive(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("event") == "visible":
            (self._seen_in.add if content["value"] else self._seen_in.discard)(str(content.get("view", "")))
            self._on_visible(bool(self._seen_in))


def tab_class(tab: str) -> str:
    """The style-sheet class of a tab's parts."""
    return f"wb-on-{tab}"
