"""What counts as an error of a page: what it complains about itself, not what a busy server did not answer it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.browser.page import LabPage

FAILED = "Failed to load resource: the server responded with a status of {}"


@dataclass
class Said:
    """A line of the console, as playwright tells it."""

    text: str
    url: str = ""
    type: str = "error"

    @property
    def location(self) -> dict[str, str]:
        return {"url": self.url}


@dataclass
class Console:
    """A page that answers as a test prescribes."""

    listeners: dict[str, Any] = field(default_factory=dict)

    def on(self, event: str, listener: Any) -> None:
        self.listeners[event] = listener


@pytest.mark.parametrize(
    ("said", "errors", "server_errors"),
    [
        (Said("Cannot read properties of null", "http://127.0.0.1:1/static/lab/x.js"), 1, 0),
        (Said("a note", type="log"), 0, 0),
        (Said("[anywidget] Failed to initialize model."), 1, 0),
        (Said(FAILED.format("500 (Internal Server Error)"), "http://127.0.0.1:1/api/sessions?1"), 0, 1),
        (Said(FAILED.format("500 (Internal Server Error)"), "http://127.0.0.1:1/ipyparallel/clusters?1"), 0, 1),
        (Said(FAILED.format("404 (Not Found)"), "http://127.0.0.1:1/api/contents/a.ipynb"), 1, 0),
        (Said(FAILED.format("500 (Internal Server Error)"), "http://127.0.0.1:1/files/workbench.js"), 1, 0),
    ],
)
def test_a_line_of_the_console_counts_where_it_belongs(said: Said, errors: int, server_errors: int) -> None:
    console = Console()
    page = LabPage(console)
    console.listeners["console"](said)
    assert (len(page.errors), len(page.server_errors)) == (errors, server_errors)


def test_an_error_that_nobody_caught_counts() -> None:
    console = Console()
    page = LabPage(console)
    console.listeners["pageerror"](RuntimeError("x is not a function"))
    assert page.errors == ["x is not a function"]
