"""The live figure in a page: Python draws a plotly figure and sends it to the page."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import anywidget
import numpy as np
import plotly
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs

from workbench.ui.assets import asset


class LiveFigureWidget(anywidget.AnyWidget):
    """Shows ``figure`` as of the end of the last ``drawing()``, in every page, also in one that opens later.

    Every trace is a trait, and so is the layout: only changes are sent, and a page asks for what it lacks.
    (Plotly's own widget sends each change as a message instead, and lets pages change the figure: a page that missed a
    message, as they do while 5 MB of script load, stays wrong.)

    Args:
        figure: changed, or replaced by another one, inside ``drawing()`` only; its number of traces stays.

    >>> import plotly.graph_objects as go
    >>> widget = LiveFigureWidget(go.Figure(go.Scatter(y=[1.0])))
    >>> with widget.drawing() as figure:
    ...     figure.data[0].y = [2.0, float("nan")]
    >>> widget.trace_0["y"]
    [2.0, None]
    """

    _esm = asset("live_figure.js")
    plotly_version = traitlets.Unicode(plotly.__version__).tag(sync=True)
    plotly_script = traitlets.Unicode().tag(sync=True)
    outline = traitlets.Dict().tag(sync=True)
    num_traces = traitlets.Int().tag(sync=True)

    def __init__(self, figure: go.Figure) -> None:
        self.figure, self._one_at_a_time, self._depth = figure, threading.RLock(), 0
        traces = dict(_traces_of(figure))
        self.add_traits(**{name: traitlets.Dict().tag(sync=True) for name in traces})
        super().__init__(plotly_script=_script(), outline=_plain(figure._layout), num_traces=len(traces), **traces)

    @contextmanager
    def drawing(self) -> Iterator[go.Figure]:
        """The figure, to be changed by one thread at a time; pages get all of the changes at once, at the end of the
        outermost ``drawing()``.
        """
        with self._one_at_a_time:
            self._depth += 1
            try:
                yield self.figure
            finally:
                self._depth -= 1
            if self._depth == 0:
                self._send_changes()

    def _send_changes(self) -> None:
        with self.hold_sync():  # one message
            self.outline = _plain(self.figure._layout)
            for name, trace in _traces_of(self.figure):
                self.set_trait(name, trace)


@cache
def _script() -> str:
    return get_plotlyjs()


def _traces_of(figure: go.Figure) -> Iterator[tuple[str, dict[str, Any]]]:
    """The traces in plotly's own form. ``to_plotly_json`` would copy them once more, 40% of a drawing."""
    return ((f"trace_{index}", _plain(trace)) for index, trace in enumerate(figure._data))


def _plain(value: Any) -> Any:
    """The value in JSON's types. JSON has no arrays; numbers that are not finite become None, a gap for plotly."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        is_plain = value.dtype.kind in "iub" or (value.dtype.kind == "f" and np.isfinite(value).all())
        return value.tolist() if is_plain else _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
