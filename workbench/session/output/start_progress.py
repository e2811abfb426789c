"""Shows the progress of a session's start in one line of a terminal, a log or a notebook."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from workbench.session.adapter import Event
from workbench.units import counted, format_seconds

_PERIOD_S = 0.5


def ipython_shell() -> Any:
    """The shell of this process; None if it is neither a notebook nor a terminal of IPython."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def in_notebook() -> bool:
    """Is this process a notebook's kernel?"""
    return getattr(ipython_shell(), "kernel", None) is not None


def progress_stream() -> TextIO:
    """Standard error; in a notebook standard output, since pages show standard error in red."""
    return sys.stdout if in_notebook() else sys.stderr


def print_progress(text: str) -> None:
    """Print one line of progress."""
    print(text, file=progress_stream())


class StartProgress:
    """Overwrites its line in terminals and notebooks. In other streams, writes a line at the start, at the end, and
    when a batch system says something else about its jobs.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._started_s = self._written_s = time.monotonic()
        self._stream = progress_stream()
        self._overwrites = in_notebook() or self._stream.isatty()
        self._jobs = ""
        self._width = 0  # of the text in the line, which a shorter text must overwrite
        self._doing = f"starting {counted(num_engines, 'engine')}"
        self._write(f"{self._doing} ...", end="" if self._overwrites else "\n")

    def engines_up(self, num_up: int, jobs: str = "") -> None:
        """``jobs``: what a batch system says about the others."""
        if jobs and jobs != self._jobs and not self._overwrites:
            self._write(jobs, end="\n")
        self._jobs = jobs
        up = f"{num_up} of {self._num_engines} engines are up"
        self._update(f"{up}; {jobs}" if jobs else up)

    def joining(self) -> None:
        self._update("engines join their world", at_once=True)

    def finish(self, text: str) -> None:
        took = format_seconds(time.monotonic() - self._started_s)
        self._write(f"{text}, started in {took}", end="\n")

    def fail(self) -> None:
        if self._overwrites:
            self._write("", end="")

    def on_event(self, event: Event) -> None:
        """Ignore the output of engines that join. A failure has its own message."""

    def on_idle(self, now: float) -> None:
        self._update(self._doing)

    def wakeup(self) -> float | None:
        return time.monotonic() + _PERIOD_S

    def _update(self, doing: str, at_once: bool = False) -> None:
        now = time.monotonic()
        self._doing = doing
        if self._overwrites and (at_once or now - self._written_s >= _PERIOD_S):
            self._written_s = now
            self._write(f"{doing}, {format_seconds(round(now - self._started_s, 1))}", end="")

    def _write(self, text: str, end: str) -> None:
        line = f"workbench: {text}" if text else ""
        if self._overwrites:
            covered, self._width = line.ljust(self._width), len(line)
            line = f"\r{covered}"
        self._stream.write(line + end)
        self._stream.flush()
