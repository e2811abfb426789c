"""The log of a run: changes, some of the steps, ranks that kept the others waiting, output of ranks; and its widget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from statistics import median

import ipywidgets as widgets

from workbench.core.metrics import RunEvent, StepBlock
from workbench.core.profile import DEFAULT_STEPS, DEFAULT_WARMUP
from workbench.ui.assets import element
from workbench.ui.controls import bar, html, on_value
from workbench.ui.number_text import three_digits
from workbench.units import counted, format_bytes, format_ranks, format_seconds

MAX_LINES = 200
_STEPS_EVERY_S = 10.0
_SLOW, _LEAST_SLOW_S = 4.0, 0.05
_SLOW_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Line:
    """One line: local time, the ranks that it is about (None: all), its text, and whether it is a warning."""

    time: str
    ranks: Sequence[int] | None
    text: str
    warns: bool = False

    @property
    def who(self) -> str:
        """The ranks in words: ``"all"``, ``"2-3"``."""
        return "all" if self.ranks is None else format_ranks(self.ranks)


class RunLog:
    """The last ``MAX_LINES`` lines of a run; ``count`` is the number of all lines."""

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        self.count = 0
        self.lines: deque[Line] = deque(maxlen=MAX_LINES)
        self._now = now
        self._times_s: deque[float] = deque(maxlen=50)  # of steps under the present strategy
        self._rates: deque[float] = deque(maxlen=50)
        self._reported = self._warned = -1e9
        self._is_finite = True

    def say(self, text: str, ranks: Sequence[int] | None = None, warns: bool = False) -> None:
        """Append a line."""
        self.count += 1
        self.lines.append(Line(f"{self._now():%H:%M:%S}", ranks, text, warns))

    def add_event(self, event: RunEvent, before: str = "", after: str = "") -> None:
        """Append a change or a pause. ``before`` and ``after`` name the strategies."""
        step = f"step {event.step}"
        if event.kind == "strategy":
            self._times_s.clear()
            self._rates.clear()
            moved = format_bytes(event.boxed_bytes) if event.boxed_bytes else "0 B moved (every slice was local)"
            moved += " moved" if event.boxed_bytes else ""
            self.say(
                f"{step} \u00b7 strategy {before} \u2192 {after}; weights and optimizer state kept, {moved}, "
                f"{format_seconds(event.time_s)}"
            )
        elif event.kind == "refused":
            self.say(f"{step} \u00b7 strategy kept: {event.text}", warns=True)
        elif event.kind == "compiling":
            if not event.text.startswith("1 "):
                return
            self.say(f"{step} \u00b7 compiling its operators; later steps run as one program between exchanges")
        elif event.kind == "uncompiled":
            self.say(f"{step} \u00b7 {event.text}", warns=True)
        elif event.kind == "profiling":
            steps, others = counted(DEFAULT_STEPS, "step"), counted(DEFAULT_WARMUP, "other")
            self.say(f"{step} \u00b7 profiles {steps} after {others}")
        elif event.kind == "unprofiled":
            self.say(f"{step} \u00b7 no profile: {event.text}", warns=True)
        else:
            self.say(f"{step} \u00b7 {'paused' if event.kind == 'paused' else 'goes on'}")

    def add_block(self, block: StepBlock, now_s: float) -> None:
        """Append the step from time to time, and at once a rank that keeps the others waiting."""
        for index, time_s in enumerate(block.step_times_s):
            self._watch(block, index, time_s, now_s)
            if time_s > 0:  # the first step of a user's loop has no known beginning
                self._times_s.append(time_s)
                self._rates.append(block.samples[index] / time_s)
        if self._is_finite:
            self._watch_loss(block)
        if now_s - self._reported >= _STEPS_EVERY_S and self._rates:
            self._reported = now_s
            losses = [loss for loss in block.losses if loss is not None]
            loss = f" \u00b7 loss {losses[-1]:.4g}" if losses else ""
            rate = three_digits(median(self._rates))
            self.say(f"step {block.stop_step}{loss} \u00b7 {rate} samples/s")

    def _watch_loss(self, block: StepBlock) -> None:
        """Append one line at the first step whose loss is not finite."""
        for step, loss in enumerate(block.losses, block.first_step + 1):
            if loss is not None and not isfinite(loss):
                self._is_finite = False
                advice = "a smaller learning rate may help, and wb.debug.find_nonfinite names the layer"
                self.say(f"step {step} \u00b7 the loss is {loss:g}: {advice}", warns=True)
                return

    def _watch(self, block: StepBlock, index: int, time_s: float, now_s: float) -> None:
        if len(self._times_s) < 10 or now_s - self._warned < _SLOW_EVERY_S or block.num_ranks < 2:
            return
        if time_s < _SLOW * median(self._times_s) or time_s < _LEAST_SLOW_S:
            return
        boxing = [rank[index] for rank in block.boxing_s]
        slow = min(range(len(boxing)), key=boxing.__getitem__)
        waited = max(boxing) - boxing[slow]
        if waited < 0.5 * time_s:
            return
        self._warned = now_s
        others = [rank for rank, seconds in enumerate(boxing) if seconds - boxing[slow] >= 0.5 * waited]
        own = format_seconds(time_s - boxing[slow])
        text = f"step {block.first_step + index + 1} \u00b7 waited {format_seconds(waited)} for rank {slow}, busy {own}"
        self.say(text, others, warns=True)

    def html(self, lines: Sequence[Line] | None = None) -> str:
        """The lines as HTML, oldest first."""
        return "".join(map(_row, self.lines if lines is None else lines))

    def head_and_tail(self, num_lines: int = 8) -> list[Line]:
        """The first and the last of the kept lines, for a picture that does not scroll."""
        kept = list(self.lines)
        if len(kept) <= num_lines:
            return kept
        hidden = Line("", (), f"\u2026 {self.count - num_lines} lines \u2026")
        half = num_lines // 2
        return [*kept[:half], hidden, *kept[-half:]]


def _row(line: Line) -> str:
    chip = (
        element("span", element("b", text=line.who, css="wb-chip", title=line.who), css="r")
        if line.who
        else element("span")
    )
    css = "l warn" if line.warns else "l"
    return element("div", element("span", text=line.time, css="t"), chip, element("span", text=line.text), css=css)


class LogSection:
    """A bar of controls and the lines of one run's log; ``show`` updates them.

    Args:
        num_ranks: the number of ranks to choose from.
    """

    def __init__(self, num_ranks: int) -> None:
        self.log = RunLog()
        self._shown: tuple[int, str] | None = None
        choices = [("all ranks", ""), *((f"rank {rank}", str(rank)) for rank in range(num_ranks))]
        self.ranks = widgets.Dropdown(options=choices, layout={"width": "110px"})
        self.follow = widgets.Checkbox(value=True, description="follow", indent=False)
        for control in (self.ranks, self.follow):
            on_value(control, lambda change: self.show())
        self.count, self.lines = html(), html("", "wb-log")
        title = html('<b class="wb-title">Log</b>')
        controls = (title, self.ranks, self.count, html("", "wb-space"), self.follow)
        self.bar = bar(*controls, css=("wb-bar", "wb-log-bar"))

    def clear(self) -> None:
        """Empty the log for another run."""
        self.log, self._shown = RunLog(), None

    def show(self) -> None:
        """Show the newest lines, or only their number if they are not followed."""
        chosen = self.ranks.value
        lines = [line for line in self.log.lines if not chosen or line.ranks is None or int(chosen) in line.ranks]
        if (self.log.count, chosen) == self._shown:
            return
        follows = self.follow.value or self._shown is None or self._shown[1] != chosen
        new = "" if follows or self._shown is None else f", {self.log.count - self._shown[0]} new"
        self.count.value = f'<span class="wb-quiet">{len(lines)} of {self.log.count} lines{new}</span>'
        if not follows:
            return
        self._shown = (self.log.count, chosen)
        self.lines.value = f'<div class="wb-log-lines"><div>{self.log.html(lines)}</div></div>'
