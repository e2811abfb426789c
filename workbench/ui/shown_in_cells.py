"""What each cell shows: what it showed before it ran again is in no page any more, and its widgets leave the kernel.

They would stay there for ever, hundreds for a panel, and a page that is loaded again would make all of them first. They
come back where their panel is displayed once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import ipywidgets as widgets
from IPython.core.getipython import get_ipython

_shown: dict[str, tuple[str, list[widgets.Widget]]] = {}
"""By cell: the request that ran it last, and what that has displayed. "" stands for what is no cell, and stays."""


def show_in_this_cell(widget: widgets.Widget) -> None:
    """Say that the present cell displays a widget. What the cell's run before displayed leaves the pages.

    What another cell shows too stays, and so does what is part of another widget.
    """
    if widget.comm is None:
        for part in _parts([widget]):
            part.open()
    request, cell = _request()
    before, earlier = _shown.get(cell, (request, []))
    still = [root for root in earlier if root.comm is not None] if request == before else []  # the user closes some
    _shown[cell] = (request, [*still, widget])
    if request == before:
        return
    stays = _parts(chain.from_iterable(roots for _, roots in _shown.values()))
    gone = [root for root in earlier if root not in stays and not _is_part_of_another(root)]
    for part in reversed(_parts(gone)):
        if part not in stays:
            _close_channel(part)


def _request() -> tuple[str, str]:
    """Of the cell that runs: the name of the request and of the cell, empty outside a page."""
    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)() or {}
    cell = parent.get("metadata", {}).get("cellId", "")
    return (parent["header"]["msg_id"], cell) if cell else ("", "")


def _parts(roots: Iterable[widgets.Widget]) -> dict[widgets.Widget, None]:
    """These and all widgets that they name, each before those that name it."""
    found: dict[widgets.Widget, None] = {}
    for root in roots:
        if root not in found:
            values = [*(getattr(root, name) for name in root.keys), getattr(root, "later", ())]
            found |= _parts(chain.from_iterable(map(_named, values))) | {root: None}
    return found


def _named(value: Any) -> Iterator[widgets.Widget]:
    if isinstance(value, widgets.Widget):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (entry for entry in value if isinstance(entry, widgets.Widget))


def _is_part_of_another(widget: widgets.Widget) -> bool:
    others = list(widgets.widget._instances.values())
    return any(widget in getattr(other, "children", ()) for other in others if other is not widget)


def _close_channel(widget: widgets.Widget) -> None:
    """What ``close`` does, for a widget that may come back: it stays complete."""
    channel, widget.comm = widget.comm, None
    if channel is not None:
        widgets.widget._instances.pop(channel.comm_id, None)
        channel.close()
