"""The state of a run as text and as a bar: three small widgets that stay in sight."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import ipywidgets as widgets

from workbench.ui.controls import html
from workbench.units import format_seconds


class RunStatus:
    """The state of a run and its progress. ``parts`` are the widgets, from left to right.

    Attributes:
        state: a dot, a word and the step.
        progress: the share of all steps.
        elapsed: percent, the time so far, and the time left.
        is_stopping: whether a stop is asked for. The state says so until the run has ended.
    """

    def __init__(self) -> None:
        self.state, self.elapsed = html("", "wb-state-host"), html("", "wb-elapsed")
        self.progress = widgets.IntProgress(value=0, min=0, max=1)
        self.progress.add_class("wb-progress")
        self.parts = (self.state, self.progress, self.elapsed)
        self.is_stopping = False
        self.clear(0)

    def clear(self, num_steps: int) -> None:
        """Begin a run of ``num_steps`` steps; 0 if their number is unknown."""
        self.is_stopping = False
        self._show_bar(0, num_steps)
        self.elapsed.value = ""

    def show_stopping(self) -> None:
        """Show that a stop is asked for."""
        self.is_stopping = True
        self.show_state("running", "stopping", "")

    def show_state(self, css: str, word: str, detail: str) -> None:
        """``css`` is one of running, paused, done, failed."""
        if self.is_stopping and css.startswith("running"):
            word, detail = "stopping", "after this step"
        value = f'<span class="wb-state {css}"><i></i>{escape(word)} <b>{escape(detail)}</b></span>'
        if self.state.value != value:
            self.state.value = value

    def show_phase(self, name: str, done: int, total: int, detail: str, left_s: float) -> None:
        """Show work before the run's own steps: ``"one device first: step 12 of 20"``."""
        self.show_state("running first", f"{name}:", f"step {done} of {total}")
        self._show_bar(done, total)
        left = f", {format_seconds(left_s)} left" if done < total else ""
        self._show_times(done, total, f"{detail}{left}")

    def show_steps(self, done: int, total: int, so_far_s: float, has_ended: bool = False) -> None:
        """Show the run's own steps. An ended run has no time left, also if it has done fewer steps than planned."""
        self._show_bar(done, total)
        text = format_seconds(so_far_s) if has_ended else f"{format_seconds(so_far_s)} so far"
        if 0 < done < total and not has_ended:
            text += f", {format_seconds(so_far_s * (total - done) / done)} left"
        self._show_times(done, total, text)

    def _show_bar(self, done: int, total: int) -> None:
        self.progress.max, self.progress.value = max(total, 1), min(done, max(total, 1))
        self.progress.layout.visibility = "visible" if total else "hidden"

    def _show_times(self, done: int, total: int, text: str) -> None:
        share = f"<b>{100 * done // total} %</b> " if total else ""
        self.elapsed.value = f'<span class="wb-quiet">{share}{escape(text)}</span>'


def title_html(names: Sequence[str], text: str) -> str:
    """The names of a run's strategies, and the text of the last one if it differs from its name."""
    title, written = " \u2192 ".join(names), "" if text in names[-1] else text
    return f'<span class="wb-title">{escape(title)}</span> <span class="wb-run-text">{escape(written)}</span>'
