"""The live figure's widget between the page's thread and the one that draws."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from workbench.ui.live import figure as live_figure
from workbench.ui.live.widget import LiveWidget


def test_what_is_drawn_while_the_page_speaks_reaches_the_page(monkeypatch: pytest.MonkeyPatch):
    figure = LiveWidget(live_figure.live_figure(1, 10), lambda: None)
    sent: list[Any] = []
    figure.observe(lambda change: sent.append(change["new"]), "_py2js_update")
    is_setting, is_drawn = threading.Event(), threading.Event()
    set_trait = LiveWidget.set_trait

    def set_slowly(widget: LiveWidget, name: str, value: Any) -> None:
        is_setting.set()
        is_drawn.wait(0.2)
        set_trait(widget, name, value)

    monkeypatch.setattr(LiveWidget, "set_trait", set_slowly)
    said = {"_js2py_traceDeltas": {"trace_deltas": [], "trace_edit_id": 0}}
    page = threading.Thread(target=figure.set_state, args=(said,))
    page.start()
    assert is_setting.wait(5)
    with figure.batch_update():
        live_figure.show_one_device(figure, [2.0, 1.0])
    is_drawn.set()
    page.join(5)
    assert any(update and [1, 2] in [list(x) for x in update["style_data"]["x"]] for update in sent)
