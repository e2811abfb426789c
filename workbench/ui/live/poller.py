"""A thread that polls a run for messages and passes them to a view, so that no cell and no click has to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from workbench.core.metrics import RunRecord
from workbench.core.strategy import Strategy
from workbench.ui.page_restore import as_request

_INTERVAL_S = 0.1


class Run(Protocol):
    """A training run in the background (``workbench.session.comparison.comparison.TrainingRun``).

    ``one_device_losses`` are those of the same steps on one device; None until they are known.
    """

    one_device_losses: Sequence[float] | None

    def poll(self) -> Sequence[object]:
        """The messages since the last call."""

    def done(self) -> bool:
        """Whether the run has ended, also by an error."""

    def stop(self) -> None:
        """Ask the run to end after its current step."""

    def interrupt(self) -> None:
        """End the run at once, in the middle of a step or of the check."""

    def pause(self) -> None:
        """Ask the run to wait after its current step."""

    def resume(self) -> None:
        """Ask a paused run to go on."""

    def profile(self) -> None:
        """Ask the run to profile its next steps; ``poll`` then has a ``Profile``."""

    def change(self, strategy: Strategy, name: str = "", predicted: Mapping[str, float] | None = None) -> None:
        """Ask the run to go on under another strategy, with the same weights. ``name`` names this part of the run, and
        ``predicted`` is kept with it.
        """

    def result(self) -> RunRecord:
        """The record of the finished run. Raises the error that ended it."""


class Poller:
    """Polls ``run`` at most 10 times a second until it is done.

    ``on_metrics`` gets the new messages. ``on_trained`` is called after the last step, before ``run.result()``, which
    may compare the run with one device. ``on_end`` is called once, with the record or the error. All three run in the
    poller's thread. An error inside ``on_metrics`` stops the run and the poller and is passed to ``on_end``: a broken
    view never looks like a run that continues.
    """

    def __init__(
        self,
        run: Run,
        on_metrics: Callable[[Sequence[object]], None],
        on_end: Callable[[RunRecord | None, BaseException | None], None],
        on_trained: Callable[[], None] = lambda: None,
    ) -> None:
        self.run = run
        self._on_metrics = on_metrics
        self._on_end = on_end
        self._on_trained = on_trained
        self._thread = threading.Thread(target=as_request(self._loop), name="workbench-poller", daemon=True)
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to poll; returns at once."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until ``on_end`` has been called; False when ``timeout_s`` passed before."""
        return self._ended.wait(timeout_s)

    def tick(self) -> bool:
        """Fetch messages and pass them on once. True when the run is done and all its messages were passed on."""
        done = self.run.done()
        if metrics := self.run.poll():
            self._on_metrics(metrics)
        return done

    def _loop(self) -> None:
        try:
            while not self.tick():
                time.sleep(_INTERVAL_S)
            self._on_trained()
            self._finish(self.run.result(), None)
        except BaseException as error:  # noqa: BLE001 - the error is passed on, never lost in a thread
            with suppress(Exception):  # the run itself may not answer any more
                if not self.run.done():
                    self.run.stop()
            self._finish(None, error)

    def _finish(self, record: RunRecord | None, error: BaseException | None) -> None:
        try:
            self._on_end(record, error)
        finally:
            self._ended.set()
