"""The part of the panel that follows a run: state, progress, and the one live figure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from html import escape

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.core.metrics import RunRecord, StepMetrics
from workbench.theme import LIGHT, Palette
from workbench.ui import live_figure
from workbench.ui.controls import bar, button, html
from workbench.ui.history import History
from workbench.units import format_seconds

_DRAW_INTERVAL_S = 0.1


class LiveView:
    """Shows one run at a time. ``box`` is empty until the first run, because the figure's script weighs 5 MB.

    Called from the pump's thread while a run goes on and from the notebook's thread otherwise.
    """

    def __init__(self, num_ranks: int, batch_size: int, on_stop: Callable[[], None]) -> None:
        self._num_ranks, self._batch_size = num_ranks, batch_size
        self._colours = LIGHT
        self._history: History | None = None
        self._started_s = self._drawn_s = 0.0
        self._has_one_device = False
        self.figure: go.FigureWidget | None = None
        self.title = html()
        self.state = html()
        self.stop = button("Stop", on_stop, icon="stop", tooltip="end the run after its current step", disabled=True)
        self.progress = widgets.IntProgress(value=0, min=0, max=1)
        self.progress.add_class("wb-progress")
        self.elapsed = html()
        self.failure = html()
        self.box = widgets.VBox()
        # Importing plotly's widget takes two seconds, which should not pass between a click on Run and its effect.
        threading.Thread(target=lambda: go.FigureWidget, name="workbench-import-plotly", daemon=True).start()

    def begin(self, title: str, text: str, num_steps: int) -> None:
        """Clear everything for a run of ``num_steps``."""
        self._history = History(num_steps, self._num_ranks, self._batch_size)
        self._started_s = time.monotonic()
        self.title.value = (
            f'<span class="wb-title">{escape(title)}</span> <span class="wb-run-text">{escape(text)}</span>'
        )
        self.progress.max, self.progress.value = num_steps, 0
        self.failure.value = ""
        self.stop.disabled = False
        self._show_state("running", "running", "one device first, then the first step")
        self._has_one_device = False
        self._begin_figure(num_steps)

    def _begin_figure(self, num_steps: int) -> None:
        if self.figure is not None:
            live_figure.begin(self.figure, num_steps, self._colours)
            return
        self.figure = go.FigureWidget(live_figure.live_figure(self._num_ranks, num_steps, self._colours))
        self.figure._config = self.figure._config | {"displaylogo": False, "displayModeBar": "hover"}
        controls = bar(self.stop, self.state, self.progress, self.elapsed, css=("wb-bar",))
        self.box.children = (
            bar(self.title, css=("wb-bar", "wb-run-title")),
            controls,
            self.failure,
            self.figure,
            html(live_figure.legend_html()),
        )

    def show_one_device(self, losses: Sequence[float]) -> None:
        """Put the losses of one device behind the run's, once they are known."""
        if self.figure is not None and not self._has_one_device:
            live_figure.set_one_device(self.figure, losses)
            self._has_one_device = True

    def add(self, metrics: list[StepMetrics]) -> None:
        """Take in records; drawn at most ten times a second."""
        assert self._history is not None
        self._history.add(metrics)
        if time.monotonic() - self._drawn_s >= _DRAW_INTERVAL_S:
            self.draw()

    def draw(self) -> None:
        """Draw everything that has arrived."""
        if self._history is None or self.figure is None:
            return
        self._drawn_s = time.monotonic()
        snapshot = self._history.snapshot()
        if not snapshot.last_step:
            return
        live_figure.update(self.figure, snapshot, self._colours)
        self.progress.value = snapshot.last_step
        self._show_state("running", "running", f"step {snapshot.last_step} of {snapshot.num_steps}")
        self._show_elapsed(snapshot.last_step, snapshot.num_steps)

    def _show_elapsed(self, step: int, num_steps: int) -> None:
        so_far = time.monotonic() - self._started_s
        left = so_far * (num_steps - step) / step
        text = (
            f"{format_seconds(so_far)} so far, {format_seconds(left)} left"
            if step < num_steps
            else format_seconds(so_far)
        )
        self.elapsed.value = f'<span class="wb-quiet">{text}</span>'

    def finish(self, record: RunRecord) -> None:
        """Show the whole run: every step, not only the reported ones."""
        self.draw()
        self.stop.disabled = True
        num_steps = len(record.losses)
        if self.figure is not None and num_steps:
            live_figure.show_record(self.figure, record, self._colours)
        stopped = self._history is not None and num_steps < self.progress.max
        self.progress.value = num_steps
        self._show_state("done", "stopped" if stopped else "finished", f"after {num_steps} steps")

    def fail(self, error: BaseException) -> None:
        """Show what ended the run, once."""
        self.draw()
        self.stop.disabled = True
        self._show_state("failed", "failed", type(error).__name__)
        self.failure.value = f'<div class="wb-failure">{escape(str(error).strip() or repr(error))}</div>'

    def use(self, colours: Palette) -> None:
        """Draw in another theme from now on."""
        if colours is not self._colours:
            self._colours = colours
            if self.figure is not None:
                live_figure.restyle(self.figure, colours)

    def _show_state(self, css: str, word: str, detail: str) -> None:
        self.state.value = f'<span class="wb-state {css}"><i></i>{word} <b>{escape(detail)}</b></span>'
