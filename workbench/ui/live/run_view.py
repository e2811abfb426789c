"""The part of a page that follows a run: its state, its progress, the live figure and the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from workbench.core.metrics import RunEvent, RunRecord, StepBlock
from workbench.theme import LIGHT, Palette
from workbench.ui.assets import element
from workbench.ui.controls import LateBox, bar, html, on_value
from workbench.ui.failures import failure_html, failure_kind, failure_lines, guarded
from workbench.ui.live import live_figure, overlays
from workbench.ui.live.figure_layout import WIDE, Frame
from workbench.ui.live.history import History, Message
from workbench.ui.live.live_picture import live_picture
from workbench.ui.live.run_log import LogSection, RunLog
from workbench.ui.live.run_status import RunStatus, device_line, title_html
from workbench.ui.live.stopwatch import Stopwatch
from workbench.ui.live.timeline_bars import timeline_bars
from workbench.ui.live.value_curves import value_curves
from workbench.ui.number_text import three_digits
from workbench.ui.page_link import PageLink
from workbench.ui.page_restore import as_request

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from workbench.ui.live.figure_widget import LiveFigureWidget

INTERVALS_S = {"curves": 0.1, "progress": 0.25, "shares": 0.5, "log": 0.2, "timeline": 1.0}
"""The least number of seconds between two updates of a part of the view."""
VIEW_CLASS = "wb-live-view"


class RunView:
    """Shows one run at a time. ``box`` is empty until the first run.

    The poller's thread calls it while a run goes on, otherwise the notebook's thread. While no page shows the view, it
    sends nothing. When a page shows it again, it sends everything once.

    Args:
        num_ranks: the number of ranks of the world.
        buttons: the widgets beside the title.
        answer_timeout_s: how long to wait for a page that has not drawn the last update yet, before the next is sent.
        has_status: whether ``status`` is part of the view. Otherwise the caller shows it.
    """

    def __init__(
        self,
        num_ranks: int,
        buttons: Sequence[widgets.Widget] = (),
        answer_timeout_s: float = 5.0,
        has_status: bool = True,
    ) -> None:
        self._num_ranks, self._answer_timeout_s = num_ranks, answer_timeout_s
        self._has_status = has_status
        self._colours, self._frame = LIGHT, WIDE
        self.history: History | None = None
        self.log_section = LogSection(num_ranks)
        self._clock = time.monotonic
        self.stopwatch = Stopwatch(lambda: self._clock())
        self._drawn_s = dict.fromkeys(INTERVALS_S, 0.0)
        self._step_shown = -1
        self._seen, self._status_seen, self._label, self._ended, self._num_runs = True, True, "", "", 0
        self._expected: Any = None
        self._peak_bytes: tuple[float, ...] = ()
        self._limit: tuple[float | None, str] = None, ""
        self._limit_at: float | None = None  # on the memory pane's axis
        self._places: tuple[tuple[int, int], ...] = ()
        self._one_device: list[float] = []
        self._record: RunRecord | None = None
        self.shown: LiveFigureWidget | None = None
        self._making, self._in_thread = threading.RLock(), guarded(self._make_figure)
        self.link = PageLink(self.use, self.fit, self._on_visible)
        self.title, self.failure, self.status = html(), html(), RunStatus()
        self.devices, self.values = html("", "wb-quiet"), html()
        self.log_scale = widgets.Checkbox(description="loss on a log scale", indent=False)
        on_value(self.log_scale, lambda change: self._draw_loss_scale())
        # All but the figure is made here: a page that is loading does not know yet what something newer contains.
        switches = bar(self.log_scale, *buttons, css=("wb-field",))
        self._above = (
            self.link,
            bar(self.title, html("", "wb-space"), switches, css=("wb-bar", "wb-run-title")),
            *([bar(*self.status.parts, css=("wb-bar", "wb-stays"))] if has_status else []),
            self.failure,
            self.devices,
        )
        self._below = (self.values, self.log_section.bar, self.log_section.lines)
        self.box = LateBox((*self._above, *self._below))
        self.box.add_class(VIEW_CLASS)

    # ---- a run begins and ends ------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the figure before a run needs it, because the page loads a script of 5 MB for it."""
        threading.Thread(target=as_request(self._in_thread), name="workbench-prepare-live-view", daemon=True).start()

    def _make_figure(self) -> LiveFigureWidget:
        with self._making:
            if self.shown is None:
                from workbench.ui.live import figure_widget

                self.shown = figure_widget.LiveFigureWidget(self._fresh_figure())
            return self.shown

    @property
    def log(self) -> RunLog:
        """The reports of the current run."""
        return self.log_section.log

    def _fresh_figure(self) -> go.Figure:
        num_steps = self.history.num_steps if self.history is not None else 0
        fresh = live_figure.empty_figure(self._num_ranks, num_steps, self._colours, self._frame)
        live_figure.show_loss_scale(fresh, self.log_scale.value)
        return fresh.update_layout(uirevision=self._num_runs)

    def begin(self, title: str, text: str, num_steps: int) -> None:
        """Clear everything for a run of ``num_steps`` (0 if unknown). ``title`` is its name."""
        self.history = History(num_steps, self._num_ranks, title)
        self.log_section.clear()
        self.log.say(title if text in title else f"{title}: {text}")
        self.stopwatch.start()
        self._label, self._one_device, self._ended, self._compiles = title, [], "", (-1, "")
        self._num_runs, self._step_shown = self._num_runs + 1, -1
        self._expected = self._limit_at = self._record = None
        self.title.value = title_html([title], text)
        self.status.clear(num_steps)
        self.failure.value = self.devices.value = self.values.value = ""
        self.status.show_state("running", "running", "waiting for the first step")
        self._begin_figure()
        self.log_section.show()

    def _begin_figure(self) -> None:
        shown = self._make_figure()
        with shown.drawing():
            shown.figure = self._fresh_figure()
            self._draw_marks()
        if not self.box.children:
            self.box.children = (*self._above, shown, *self._below)

    def finish(self, record: RunRecord) -> None:
        """Show the whole run after its end, also in pages that open later."""
        num_steps = len(record.losses)
        stopped = self.history is not None and 0 < num_steps < self.history.num_steps
        word = "stopped" if stopped else "finished"
        self.log.say(f"{word} after {num_steps} steps")
        self.end(word, f"after {num_steps} steps")
        self._record = record if num_steps else None
        self._show_record()
        self._show_progress(num_steps)

    def _show_record(self) -> None:
        if self.shown is None:
            return
        with self.shown.drawing() as figure:
            if self._record is not None:
                live_figure.show_record(figure, self._record, self._colours)
            self._draw_marks()

    def leave(self, why: str) -> None:
        """Show that the run was stopped before its first step."""
        self.log.say(why)
        self.end("stopped", "before the first step")

    def end(self, word: str, detail: str, css: str = "done") -> None:
        """Show all steps after the last one, also in pages that open later."""
        self.stopwatch.stop()
        self._ended, self._seen = word, True
        self.status.show_state(css, word, detail)
        self.draw(everything=True)
        self._draw_marks()

    def fail(self, error: BaseException) -> None:
        """Show the error that ended the run, once."""
        self.failure.value = failure_html(error)
        self.log.say(f"failed: {failure_lines(error)[0]}", warns=True)
        self.end("failed", failure_kind(error), "failed")

    # ---- a run goes on --------------------------------------------------------------------------------------------

    def expect(
        self,
        estimate: Any,
        peak_bytes: Sequence[float] = (),
        places: Sequence[tuple[int, int]] = (),
        limit: tuple[float | None, str] = (None, ""),
    ) -> None:
        """Draw a prediction from the current step on, until another one replaces it.

        Args:
            estimate: a ``cost.Estimate``, or None.
            peak_bytes: predicted peak of memory, by rank.
            places: by rank, its stage and its number in the stage.
            limit: memory of a rank, None if unknown, and the name of the machine that has it.
        """
        self._expected, self._peak_bytes = estimate, tuple(peak_bytes)
        self._places, self._limit = tuple(places), limit
        if self.shown is None or self.history is None:
            return
        with self.shown.drawing() as figure:
            self._draw_marks()
            if estimate is not None:
                steps = self.history.num_steps, estimate.samples_per_s, self.history.last_step
                live_figure.show_expected(figure, *steps, self._colours)

    def add_one_device(self, block: StepBlock) -> None:
        """Add steps of the one-device run to the plot. It runs before the others if its losses are not known yet."""
        if block.first_step == 0:
            self._one_device = []
        self._one_device += [loss for loss in block.losses if loss is not None]
        if not (block.stop_step == block.num_steps or (self._status_seen and self._is_due("progress"))):
            return
        times_s = [max(time_s, 1e-9) for time_s in block.step_times_s]
        rate = f"{three_digits(median(n / s for n, s in zip(block.samples, times_s, strict=True)))} samples/s"
        left_s = median(times_s) * (block.num_steps - block.stop_step)
        self.status.show_phase("one device first", block.stop_step, block.num_steps, rate, left_s)
        self._show_one_device(block.stop_step)

    def show_one_device(self, losses: Sequence[float]) -> None:
        """Draw the losses of one device behind those of the run, once all of them are known."""
        if len(losses) != len(self._one_device):
            self._one_device = list(losses)
            self._show_one_device()

    def _show_one_device(self, last_step: int = 0) -> None:
        if self.shown is None or self.history is None:
            return
        with self.shown.drawing() as figure:
            live_figure.show_one_device(figure, self._one_device, self._colours)
            live_figure.show_steps(figure, max(last_step, self.history.last_step), self.history.num_steps)

    def add(self, messages: Sequence[Message], label: Callable[[str], str] = str) -> None:
        """Add reports, and draw the parts that are due. ``label`` returns the name of a strategy's text."""
        assert self.history is not None
        is_first = not self.history.last_step
        self.history.add(messages)
        if is_first and self.history.last_step:  # the one-device run's time does not count
            self.stopwatch.start(sum(sum(m.step_times_s) for m in messages if isinstance(m, StepBlock)))
        for message in messages:
            if isinstance(message, StepBlock):
                self.log.add_block(message, self._clock())
            elif isinstance(message, RunEvent):
                self._add_event(message, label)
        self.draw()

    def _add_event(self, event: RunEvent, label: Callable[[str], str]) -> None:
        assert self.history is not None
        after = label(event.text) if event.kind == "strategy" else ""
        self.log.add_event(event, self._label, after)
        if event.kind == "strategy":
            self._label = after
            self.history.change(event.step, after)
            names = [self.history.changes[0].before, *(change.after for change in self.history.changes)]
            self.title.value = title_html(names, event.text)
        elif event.kind == "compiling":
            self._compiles = event.step, event.text
            self._show_progress()
        elif event.kind == "paused":
            self.stopwatch.pause()
            self.status.show_state("paused", "paused", f"after step {event.step}")
        elif event.kind == "running" and self.stopwatch.is_paused:
            self.stopwatch.resume()
            self.status.show_state("running", "running", f"step {event.step}")
        self._draw_marks()

    def draw(self, everything: bool = False) -> None:
        """Draw the parts with new reports that are due; with ``everything``, all parts with new reports."""
        if self.history is None or self.shown is None:
            return
        if self.history.last_step and (everything or (self._status_seen and self._is_due("progress"))):
            self._show_progress()
        if not self._seen:
            return
        if not everything and self.link.is_behind(self._clock(), self._answer_timeout_s):
            return
        due = {name for name in INTERVALS_S if name != "progress" and (everything or self._is_due(name))}
        if self.history.last_step:
            if due & {"curves", "shares", "timeline"}:
                self._draw_figure(due)
            if due:
                self.link.ask(self._clock())
        if "log" in due:
            self.log_section.show()

    def _draw_figure(self, due: set[str]) -> None:
        assert self.history is not None
        assert self.shown is not None
        history = self.history
        with self.shown.drawing() as figure:
            if "curves" in due:
                live_figure.show_curves(figure, history, self._colours, bool(self._ended))
                live_figure.show_steps(figure, history.last_step, history.num_steps)
            if "shares" in due:
                expected = self._limit[0], self._peak_bytes
                self._limit_at = live_figure.show_memory(figure, history, self._colours, *expected)
                live_figure.show_split(figure, history.split, history.boxed_bytes, self._colours)
                self._draw_marks()
                self.values.value = value_curves(history)
                flops = getattr(self._expected, "flops_per_sample", 0.0) * (history.latest_rate or 0.0)
                self.devices.value = device_line(history.devices, flops)
            if "timeline" in due and history.timeline and history.timeline[0].step != self._step_shown:
                self._step_shown = history.timeline[0].step
                simulated = getattr(self._expected, "timeline", None)
                live_figure.show_timeline(figure, timeline_bars(history.timeline, simulated), self._colours)

    def _draw_marks(self) -> None:
        """Draw over the panes: changes of the strategy, a pause, the memory limit, the ranks' colours."""
        if self.shown is None or self.history is None:
            return
        with self.shown.drawing() as figure:
            overlays.show_changes(figure, self.history.changes, self._colours)
            overlays.show_pause(figure, self.stopwatch.is_paused, self._colours)
            overlays.show_limit(figure, self._limit_at, *self._limit, self._colours)
            overlays.show_stages(figure, self._places, self._colours)

    def _is_due(self, name: str) -> bool:
        now = self._clock()
        if now - self._drawn_s[name] < INTERVALS_S[name] * 0.95:
            return False
        self._drawn_s[name] = now
        return True

    def _show_progress(self, last_step: int = 0) -> None:
        assert self.history is not None
        step, num_steps = last_step or self.history.last_step, self.history.num_steps
        if not (self.stopwatch.is_paused or self.stopwatch.is_stopped):
            word = f"compiling part {self._compiles[1]}" if step <= self._compiles[0] else "running"
            self.status.show_state("running", word, f"step {step}" + (f" of {num_steps}" if num_steps else ""))
        self.status.show_steps(step, num_steps, self.stopwatch.seconds, self.stopwatch.is_stopped)

    def static_html(self) -> str:
        """The view without scripts: title, failure, picture, the log's first and last lines. Empty before a run."""
        if self.history is None:
            return ""
        log = element("pre", text="\n".join(f"{x.time}  {x.who:<5} {x.text}" for x in self.log.head_and_tail()))
        drawn = self.history, self._one_device, *self._limit, self.log_scale.value
        picture = live_picture(*drawn) if self.history.last_step else ""
        parts = self.title.value, self.failure.value, picture, value_curves(self.history), log
        return element("div", *parts, css="wb-static-run")

    # ---- the page -------------------------------------------------------------------------------------------------

    def see_status(self, seen: bool) -> None:
        """Record whether a page shows ``status``, if it is not part of the view."""
        self._status_seen = seen
        if seen and not self._ended:
            self.draw()

    def _on_visible(self, seen: bool) -> None:
        self._seen = seen
        if self._has_status:
            self._status_seen = seen
        if seen and not self._ended:  # an ended run was drawn at its end
            self.draw(everything=True)

    def use(self, colours: Palette) -> None:
        """Draw in this theme from now on."""
        if colours is not self._colours:
            self._colours = colours
            self._redraw()

    def fit(self, width_px: float) -> None:
        """Draw in this width, in pixels, from now on. A view too narrow for four panes in a row has two rows."""
        frame = Frame.within(width_px)
        if frame != self._frame:
            self._frame = frame
            (self.box.remove_class if frame.num_columns == 4 else self.box.add_class)("wb-narrow")
            self._redraw()

    def _draw_loss_scale(self) -> None:
        if self.shown is not None:
            with self.shown.drawing() as figure:
                live_figure.show_loss_scale(figure, self.log_scale.value)

    def _redraw(self) -> None:
        if self.shown is None or self.history is None:
            return
        with self.shown.drawing() as figure:
            self.shown.figure = fresh = self._fresh_figure()
            live_figure.keep_prediction(fresh, figure)
            live_figure.show_legends(fresh, self._colours)
            self._step_shown = -1
            if self.history.last_step:
                self._draw_figure({"curves", "shares", "timeline"})
            if self._one_device:
                self._show_one_device(0 if self.history.last_step else len(self._one_device))
            self._show_record()
