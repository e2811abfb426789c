"""The state of a run as text and as a bar: three small widgets that stay in sight. The run's GPUs in one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import ipywidgets as widgets

from workbench.ui.controls import html
from workbench.ui.number_text import from_to
from workbench.units import format_bytes, format_seconds


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
        self.state.value = f'<span class="wb-state {css}"><i></i>{escape(word)} <b>{escape(detail)}</b></span>'

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


def device_line(devices: Sequence[dict[str, float]], flops_per_s: float = 0.0) -> str:
    """What the GPUs of all ranks do; empty without any.

    Args:
        devices: by rank, the known ones of ``core.metrics.DEVICE_KINDS``.
        flops_per_s: operations per second of the training, all ranks together; 0 if unknown.

    >>> device_line([{"busy": 0.9, "used": 3e10, "total": 8e10, "pool": 2e10, "peak_flops_per_s": 1e15}], 4e14)
    'GPU: 90 % busy, 30.0 GB of 80.0 GB in use, 20.0 GB reserved by a rank, 40 % of its peak flop/s'
    """
    if not any(devices):
        return ""
    gpus = {device.get("gpu", rank): device for rank, device in enumerate(devices)}  # ranks may share one
    parts = []
    if busy := _known(gpus.values(), "busy"):
        parts.append(f"{from_to([f'{100 * share:.0f}' for share in busy])} % busy")
    if used := _known(gpus.values(), "used"):
        total = format_bytes(max(_known(gpus.values(), "total"), default=0.0))
        parts.append(f"{from_to([format_bytes(size) for size in used])} of {total} in use")
    if pool := _known(devices, "pool"):
        parts.append(f"{from_to([format_bytes(size) for size in pool])} reserved by a rank")
    peaks = _known(gpus.values(), "peak_flops_per_s")
    if flops_per_s and len(peaks) == len(gpus):
        parts.append(f"{100 * flops_per_s / sum(peaks):.0f} % of {'its' if len(gpus) == 1 else 'their'} peak flop/s")
    return f"GPU{'s' * (len(gpus) > 1)}: {', '.join(parts)}"


def _known(devices: Iterable[dict[str, float]], kind: str) -> list[float]:
    """The values that are known, ascending."""
    return sorted(device[kind] for device in devices if kind in device)
