"""The log of one run, written by all its writers, each in a thread of its own.

A writer may be slow, and fail: a full disk, a server that is gone. A run must not wait for it or end with it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from workbench.core.metrics import RunRecord, StepBlock
from workbench.writers.protocol import Writer

CLOSE_S = 10.0
"""How long the end of a run waits for its writers."""
BEGIN_S = 30.0
"""How long it waits for one that still begins. MLflow makes the tables of a database, which no later run can use where
this is broken off.
"""
Row = tuple[int, dict[str, float]]


def rows_of(block: StepBlock) -> list[Row]:
    """The values of each step, counted from 1; an evaluation of an earlier step comes first.

    >>> rows_of(StepBlock(4, (64,), (0.5,), ((0.25,),), ((0.0,),), ((0,),), values={"accuracy": ((3, 0.75),)}))
    [(4, {'accuracy': 0.75}), (5, {'loss': 0.5, 'samples_per_s': 256.0})]
    """
    rows: dict[int, dict[str, float]] = {}
    for step, (loss, samples, time_s) in enumerate(
        zip(block.losses, block.samples, block.step_times_s, strict=True), block.first_step + 1
    ):
        rows[step] = {} if loss is None else {"loss": loss}
        if samples and time_s > 0:
            rows[step]["samples_per_s"] = samples / time_s
    for name, pairs in block.values.items():
        for number, value in pairs:
            rows.setdefault(number + 1, {})[name] = value
    return sorted((step, values) for step, values in rows.items() if values)


class RunLog:
    """Writes one run. Failures of a writer become one warning, where ``add`` or ``close`` is called next.

    Args:
        begin: the writers.
        name: of the run.
        settings: what the run is: strategy, batch size, seed, versions.
    """

    def __init__(self, begin: Sequence[Writer], name: str, settings: Mapping[str, Any]) -> None:
        self._threads = [_WriterThread(writer, name, settings) for writer in begin]

    def add(self, messages: Iterable[object]) -> None:
        """Write the steps among the reports of a run."""
        for message in messages:
            if isinstance(message, StepBlock):
                self._put(rows_of(message))

    def add_record(self, record: RunRecord) -> None:
        """Write the steps of a finished run."""
        steps = enumerate(zip(record.losses, record.step_rates, strict=False), 1)
        self._put(
            [
                (step, {"loss": loss, **({"samples_per_s": rate} if rate == rate else {})})
                for step, (loss, rate) in steps
            ]
        )

    def _put(self, rows: Sequence[Row]) -> None:
        for thread in self._threads:
            if thread.is_alive():  # else it has failed, and reads no more
                thread.rows.put(rows)
            thread.warn()

    def close(self, error: str | None = None) -> None:
        """End the log, once. Waits for slow writers, but not long."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.error = error
            thread.rows.put(None)
        for thread in threads:
            if thread.has_begun.wait(BEGIN_S):
                thread.join(CLOSE_S)
            thread.warn(is_last=True)


class _WriterThread(threading.Thread):
    """One writer of one run."""

    def __init__(self, begin: Writer, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__(name=f"workbench-log-{name}", daemon=True)
        self._begin, self._run_name, self._settings = begin, name, dict(settings)
        self.rows: SimpleQueue[Sequence[Row] | None] = SimpleQueue()
        self.error: str | None = None
        self.has_begun = threading.Event()
        self._failure: BaseException | None = None
        self._has_warned = False
        self.start()

    def run(self) -> None:
        try:
            try:
                writer = self._begin(self._run_name, self._settings)
            finally:
                self.has_begun.set()
            try:
                while (rows := self.rows.get()) is not None:
                    for step, values in rows:
                        writer.add(step, values)
            except BaseException:
                self._close_broken(writer)
                raise
            writer.close(self.error)
        except BaseException as failure:  # noqa: BLE001 - any package may fail in any way; the run goes on
            self._failure = failure

    @staticmethod
    def _close_broken(writer: Any) -> None:
        try:
            writer.close("its writer failed")
        except Exception:  # noqa: BLE001 - the first failure is the one to report
            return

    def warn(self, is_last: bool = False) -> None:
        """Say once that this writer has failed, or that it is not done at the end."""
        is_late = is_last and self.is_alive()
        if self._has_warned or not (self._failure or is_late):
            return
        self._has_warned = True
        kind = getattr(getattr(self._begin, "func", self._begin), "__name__", "a writer")
        late = f"not done after {CLOSE_S:g} s" if self.has_begun.is_set() else f"not begun after {BEGIN_S:g} s"
        what = f"{type(self._failure).__name__}: {self._failure}" if self._failure else late
        warnings.warn(
            f"the log of run {self._run_name!r} ({kind}) is not complete: {what}. The run goes on without it.",
            stacklevel=4,
        )
