"""Errors in the panel's callbacks are shown in the panel.

An exception in a widget's handler or in a thread goes to a log that users do not see, and the panel seems to ignore
the click. So every handler is ``guarded``: the panel under construction shows the handler's failures.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import ipywidgets as widgets

from workbench.errors import CellError, WorkbenchError
from workbench.ui.assets import element

_LONGEST_WORDS = 12
"""Lines of an error that are shown at once; the rest is behind the fold."""


class Failures:
    """The newest failure as text, with its traceback behind a fold. ``box`` is the widget, empty without a failure.

    The failure disappears when its source works again, or when the user closes it.
    """

    def __init__(self) -> None:
        self._text = widgets.HTML()
        dismiss = widgets.Button(icon="times", tooltip="I have read it")
        dismiss.add_class("wb-icon")
        dismiss.on_click(lambda _: self.clear())
        self._source: object = None
        self.error: BaseException | None = None
        self.box = widgets.HBox([self._text, dismiss])
        self.box.add_class("wb-failures")
        self.clear()

    def show(self, error: BaseException, source: object = None) -> None:
        """Show an error until ``source`` works, or until the user closes it."""
        self._text.value = failure_html(error)
        self.box.layout.display = ""
        self.error, self._source = error, source

    def clear(self) -> None:
        """Remove the failure."""
        self.error = self._source = None
        self._text.value = ""
        self.box.layout.display = "none"

    def guard(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its exceptions shown here: it then returns None."""

        @functools.wraps(action)
        def guarded_action(*args: Any, **kwargs: Any) -> Any:
            try:
                result = action(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - every failure is shown; callers could do no more
                self.show(error, guarded_action)
                return None
            if self._source is guarded_action:
                self.clear()
            return result

        return guarded_action

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context in which guarded handlers show their failures here."""
        token = _collecting.set(self)
        try:
            yield
        finally:
            _collecting.reset(token)


_collecting: ContextVar[Failures | None] = ContextVar("workbench_failures", default=None)


def guarded(action: Callable[..., Any]) -> Callable[..., Any]:
    """``action`` as a handler of the panel under construction. Without a panel it is returned unchanged."""
    failures = _collecting.get()
    return action if failures is None else failures.guard(action)


def failure_kind(error: BaseException) -> str:
    """The type of an error, or those of the errors on ranks; empty where these have none of their own, as after a kill.

    >>> failure_kind(ValueError("a < b"))
    'ValueError'
    """
    if not isinstance(error, CellError):
        return type(error).__name__
    return ", ".join(sorted({failure.kind for failure in error.failures.values() if not failure.was_stopped}))


def failure_lines(error: BaseException) -> list[str]:
    """An error in words, at least one line: its message, after its type unless the message is of this package.

    >>> failure_lines(ValueError("a < b"))
    ['ValueError: a < b']
    """
    text = str(error).strip()
    is_ours = isinstance(error, WorkbenchError) and text
    return (text if is_ours else f"{type(error).__name__}: {text}".removesuffix(": ")).splitlines()


def failure_html(error: BaseException) -> str:
    """An error as HTML: its first line, and behind a fold the rest and the traceback.

    >>> print(failure_html(ValueError("a < b")).partition("<details")[0])
    <div class="wb-failure"><div>ValueError: a &lt; b</div>
    """
    lines = failure_lines(error)
    rest = "\n".join([*lines[_LONGEST_WORDS:], "".join(traceback.format_exception(error))])
    fold = element("details", element("summary", text="traceback"), element("pre", text=rest))
    return element("div", element("div", text="\n".join(lines[:_LONGEST_WORDS])), fold, css="wb-failure")
