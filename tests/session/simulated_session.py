"""A session whose engines are simulated ranks: what a comparison submits runs at once, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.errors import SessionError
from workbench.testing import run_ranks


class Finished:
    """A call that has ended, well or not."""

    def __init__(self, fn: Callable[[], list[Any]]) -> None:
        self._results: list[Any] = []
        self._error: Exception | None = None
        try:
            self._results = fn()
        except Exception as error:  # noqa: BLE001 - raised again by result(), as a session does
            self._error = error

    def result(self, timeout: float | None = None) -> list[Any]:
        if self._error is not None:
            raise SessionError(str(self._error)) from self._error
        return self._results

    def done(self) -> bool:
        return True

    def messages(self) -> list[Any]:
        return []


class SimulatedSession:
    """As much of a ``Session`` as ``Comparison`` needs. ``submitted`` names what was run, but no questions."""

    def __init__(self, num_engines: int = 2, device: str | torch.device = "cpu") -> None:
        self.num_engines, self.device = num_engines, device
        self.submitted: list[str] = []
        self.is_busy = False

    def submit(self, fn: Callable[..., Any], *args: Any, ranks: list[int] | None = None, label: str = "") -> Finished:
        if fn.__name__ != "has_job":
            self.submitted.append(fn.__name__)
        if ranks is not None or fn.__name__.endswith("_job"):
            return Finished(lambda: [fn(*args)] if self.device == "cpu" else self._run(fn, args, 1))
        return Finished(lambda: self._run(fn, args, self.num_engines))

    def _run(self, fn: Callable[..., Any], args: Any, num_ranks: int) -> list[Any]:
        return run_ranks(lambda: fn(*args), num_ranks, device=self.device)
