"""What a page that is loaded again gets: the state of all widgets, and then what has changed while it was loading.

Such a page asks for all states at once. ipywidgets answers on the channel that was opened last, though JupyterLab may
open two, and not at all if a thread makes a widget meanwhile. Four seconds later the page asks widget by widget, and
takes a change that a thread sends in the name of that request for the whole state: the widget stays empty. And changes
between the answer and the moment at which the page has made its own widgets reach nobody.

So this module answers in the place of ipywidgets, threads send in the name of the request that started them
(`as_request`), and a page that shows a view gets the view's present state (`MissedChanges`).
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets as widgets
from ipywidgets import comm

_TARGET = "jupyter.widget.control"
_MOST_TRIES = 20
_CONSTANT = ("_model_", "_view_", "_esm", "_css", "_anywidget", "plotly_")
"""The beginnings of the names of traits that never change."""
_num_loaded = 0


def install() -> None:
    """Answer the pages of this kernel. Safe to call again."""
    manager = comm.get_comm_manager()
    if manager is not None:
        manager.register_target(_TARGET, _open)


def _open(channel: Any, message: dict[str, Any]) -> None:
    """Handle a page that has opened its channel."""
    global _num_loaded
    widgets.Widget.handle_control_comm_opened(channel, message)
    _num_loaded += 1
    channel.on_msg(functools.partial(_answer, channel))


def _answer(channel: Any, message: dict[str, Any]) -> None:
    """Send the states on the channel that asked. Widgets that come or go meanwhile begin it anew."""
    for tries_left in reversed(range(_MOST_TRIES)):
        widgets.Widget._control_comm = channel
        try:
            widgets.Widget._handle_control_comm_msg(message)
            return
        except (RuntimeError, AttributeError):  # the dictionary has changed; a widget that is closed has no channel
            if not tries_left:
                raise


def as_request(target: Callable[..., Any]) -> Callable[..., Any]:
    """The target of a thread that changes widgets: what it sends belongs to the request that is handled now.

    >>> threading.Thread(target=as_request(self._loop)).start()          # doctest: +SKIP
    """
    return functools.partial(contextvars.copy_context().run, target)


class MissedChanges:
    """Sends a widget, and all that it contains, once more to views in pages that were loaded since it was made.

    Args:
        root: contains what reports its views, so a page that has a view of it has made all widgets below.
    """

    def __init__(self, root: widgets.Widget) -> None:
        self._root, self._num_loaded, self._views = root, _num_loaded, set[str]()

    def send_to(self, view: str) -> None:
        """Handle a report of a view."""
        if view in self._views:
            return
        self._views.add(view)
        if self._num_loaded < _num_loaded:
            for widget in _with_all_below(self._root):
                _send_again(widget)


def _with_all_below(root: widgets.Widget) -> Iterator[widgets.Widget]:
    """The contents first, so that a page knows what a widget names."""
    found: dict[int, widgets.Widget] = {}
    waiting = [root]
    while waiting:
        widget = waiting.pop()
        if id(widget) not in found:
            found[id(widget)] = widget
            waiting += [*getattr(widget, "children", ()), *filter(None, [getattr(widget, "layout", None)])]
    return reversed([widget for widget in found.values() if widget.comm is not None])


def _send_again(widget: widgets.Widget) -> None:
    """Send all that can change. A thread may change it meanwhile, so that what is sent last is old: then once more."""
    names = [name for name in widget.keys if not name.startswith(_CONSTANT)]
    for _ in range(_MOST_TRIES):
        state = widget.get_state(names)
        widget.send_state(names)
        if widget.get_state(names) == state:
            return
