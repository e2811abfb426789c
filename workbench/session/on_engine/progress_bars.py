"""Sends the progress bars of tqdm to the notebook, which draws one bar for all ranks.

A bar that writes to a file of the user's is left unchanged.
"""

from __future__ import annotations

import itertools
import sys
import time
from types import ModuleType
from typing import Any

from tqdm import std  # type: ignore[import-untyped]

from workbench.session import protocol
from workbench.session.on_engine.shell import current_tag, send

_NAMES = {"tqdm": "tqdm", "trange": "trange", "tqdm_notebook": "tqdm", "tnrange": "trange"}
#: An error that ends a loop closes its bar at once, as ``break`` does. If a failure follows within this much processor
#: time of the thread, the bar has failed.
_UNWINDING_S = 0.1
_PLACE = "<bar/>"


class PublishedBar(std.tqdm):
    """A bar of tqdm that is sent to the notebook. ``gui=True`` switches off the parts that write to a terminal."""

    disable: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_published = kwargs.get("file") in (None, sys.stdout, sys.stderr) and current_tag() is not None
        self._run, self._number, self._name, self._state = -1, 0, "", "runs"
        if self._is_published:
            kwargs["gui"] = True
        super().__init__(*args, **kwargs)
        if self._is_published and not self.disable and self.delay <= 0:
            self.display()

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Send the present bar. tqdm calls this at most once per ``mininterval``."""
        if not self._is_published:
            return super().display(msg, pos)
        tag = current_tag()
        if tag is None:
            return False
        if tag.run != self._run:
            self._run, self._number, self._name = tag.run, _bars.begin(tag.run, self), self.desc
        numbers = self.format_dict
        template = numbers["bar_format"] or "{l_bar}{bar}{r_bar}"
        text = self.format_meter(**{**numbers, "bar_format": template.replace("{bar}", _PLACE), "colour": None})
        left, _, right = text.partition(_PLACE) if _PLACE in text else ("", "", text)
        sides = left.rstrip("|"), right.lstrip("|")
        send(protocol.Bar(self._number, self._name, *sides, self.n, self.total, abs(self.pos), self._state))
        return True

    def clear(self, *args: Any, **kwargs: Any) -> None:
        """tqdm calls this before it prints. No bar stands in the output, so there is nothing to clear."""
        if not self._is_published:
            super().clear(*args, **kwargs)

    def close(self) -> None:
        """The bar has ended, or ``break`` has left its loop."""
        if not self._is_published:
            super().close()
        elif not self.disable:
            self.disable = True
            is_kept = abs(self.pos) == 0 if self.leave is None else self.leave
            is_whole = self.total is None or self.n >= self.total
            if self._state != "failed":
                self._state = "gone" if not is_kept else "finished" if is_whole else "left"
            self._closed_s = time.thread_time()
            if (tag := current_tag()) is not None and tag.run == self._run:  # not one of an earlier cell
                self.display()
            self._decr_instances(self)

    def fail(self) -> None:
        """An error has ended the loop that the bar counted, if the loop is of this request."""
        if (tag := current_tag()) is None or tag.run != self._run:
            return
        was_closed_by_it = self.disable and time.thread_time() - self._closed_s < _UNWINDING_S
        if self._state == "runs" or (self._state == "left" and was_closed_by_it):
            self._state = "failed"
            self.display()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        if kind is not None and self._is_published:
            self._state = "failed"
        return super().__exit__(kind, error, traceback)


class _RequestBars:
    """The bars of the running request."""

    def __init__(self) -> None:
        self._run = -1
        self._numbers, self.open = itertools.count(), list[PublishedBar]()

    def begin(self, run: int, bar: PublishedBar) -> int:
        if run != self._run:
            self._run, self._numbers, self.open = run, itertools.count(), []
        self.open = [other for other in self.open if other._state in ("runs", "left")] + [bar]
        return next(self._numbers)

    def end(self, _result: Any = None) -> None:
        """Send where bars stand that nobody has closed. Those that the cell does not keep are closed by tqdm here."""
        for bar in self.open:
            if bar._state == "runs":
                bar.display()
        self.open = []


_bars = _RequestBars()


class TextBars(ModuleType):
    """Replaces a module of tqdm with widgets, which an engine could not show."""

    __all__ = tuple(_NAMES)

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(std, _NAMES[name])


def install(here: Any) -> None:
    """Make every bar that cells can import from tqdm a `PublishedBar`."""
    import tqdm

    std.tqdm = tqdm.tqdm = PublishedBar
    for name in ("tqdm.autonotebook", "tqdm.notebook"):
        sys.modules.setdefault(name, TextBars(name))
    plain_show = here._showtraceback

    def showtraceback(kind: type[BaseException], error: BaseException, text: list[str]) -> None:
        for bar in list(_bars.open):
            bar.fail()
        plain_show(kind, error, text)

    here._showtraceback = showtraceback
    here.events.register("post_run_cell", _bars.end)
