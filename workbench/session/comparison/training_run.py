"""A run of a strategy on the engines: its reports, the notebook's commands to it, and its record."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from workbench.core.metrics import RunEvent, RunRecord, StepBlock, StepSpans, bubble
from workbench.core.profile import Profile, RankPart
from workbench.core.strategy import Strategy
from workbench.session import profiles
from workbench.session.cluster import Session
from workbench.session.comparison.checker import RunObserver
from workbench.session.comparison.run_records import AnnouncedStrategy
from workbench.session.comparison.saved_runs import RunFile
from workbench.session.comparison.subject import StrategyLike
from workbench.session.remote_call import RemoteCall, ended_on_interrupt
from workbench.training.runs.job import RankResult
from workbench.writers.run_log import RunLog

_POLL_S = 0.3
Message = StepBlock | StepSpans | RunEvent


class Judge(Protocol):
    """What a run needs of its ``Comparison``."""

    session: Session

    def strategy(self, wanted: StrategyLike) -> Strategy:
        """A strategy checked against the job."""

    def record(self, run: TrainingRun, reports: Sequence[RankResult], observer: RunObserver | None = None) -> RunRecord:
        """The finished run, compared with one device."""


class TrainingRun:
    """The training of one strategy, while the notebook goes on."""

    def __init__(
        self,
        comparison: Judge,
        planned: RunRecord,
        strategy: Strategy,
        call: RemoteCall,
        file: RunFile | None,
        log: RunLog,
    ) -> None:
        self.comparison, self.planned, self.strategy, self.call = comparison, planned, strategy, call
        self._file, self._log = file, log
        self._values: dict[str, list[tuple[int, float]]] = {}
        self._spans: dict[int, dict[int, StepSpans]] = {}  # by step and rank, of steps that some ranks have reported
        self._bubbles: dict[int, float | None] = {}  # by step
        self._record: RunRecord | None = None
        self._interrupted = threading.Event()
        self.announced: dict[str, AnnouncedStrategy] = {}
        self._parts: dict[int, RankPart] = {}  # of a profile, by rank

    @property
    def name(self) -> str:
        """The name of the run in tables."""
        return self.planned.name

    @property
    def run_id(self) -> str:
        """The name of the run's file; empty if it is not kept."""
        return self._file.run_id if self._file is not None else ""

    def poll(self) -> list[Message | Profile]:
        """Reports since the last call: blocks of steps of all ranks, spans, events, profiles."""
        messages = [message for _, message in self.call.messages()]
        found = [message for message in messages if isinstance(message, Message)]
        if self._file is not None:
            self._file.add(found)
        self._log.add(found)
        for message in found:
            if isinstance(message, StepSpans):
                ranks = self._spans.setdefault(message.step, {})
                ranks[message.rank] = message
                if len(ranks) == self.planned.num_ranks:
                    self._bubbles[message.step] = bubble(list(self._spans.pop(message.step).values()))
            elif isinstance(message, RunEvent) and message.kind == "paused":
                self.call.describe(f"training run {self.name!r}, which is paused")
            elif isinstance(message, StepBlock):
                for name, pairs in message.values.items():
                    self._values.setdefault(name, []).extend(pairs)
                self.call.describe(f"training run {self.name!r}, step {message.stop_step} of {message.num_steps}")
        return [*found, *self._profiles(messages)]

    def _profiles(self, messages: Sequence[object]) -> list[Profile]:
        """The profile, once all ranks have sent their parts."""
        self._parts |= {message.profile.rank: message for message in messages if isinstance(message, RankPart)}
        if len(self._parts) < self.planned.num_ranks:
            return []
        parts, self._parts = [self._parts[rank] for rank in sorted(self._parts)], {}
        return [profiles.made_of(self.comparison.session, parts)]

    def done(self) -> bool:
        """Whether the run has ended, also by an error."""
        return self.call.done()

    def stop(self) -> None:
        """Ask the run to end at the next step; it keeps its measurements."""
        self.call.send_command("stop")

    def interrupt(self) -> None:
        """End the run at once, in the middle of a step or of the check."""
        self._interrupted.set()
        self.call.cancel()

    def pause(self) -> None:
        """Ask the run to wait after its current step."""
        self.call.send_command("pause")

    def resume(self) -> None:
        """Ask a paused run to go on."""
        self.call.send_command("resume")

    def profile(self) -> None:
        """Ask the run to profile its next steps; `poll` has the profile when they are taken."""
        self.call.send_command("profile")

    def change(self, strategy: StrategyLike, name: str = "", predicted: Mapping[str, float] | None = None) -> None:
        """Ask the run to go on under another strategy from its next step, with the same weights and optimizer state.

        Args:
            name: the name of this part of the run in tables. Default: the strategy's text.
            predicted: its prediction, see ``RunRecord``.

        Raises:
            StrategyError: it does not fit the model or the number of engines.
        """
        text = str(self.comparison.strategy(strategy))
        self.announced[text] = AnnouncedStrategy(name or text, predicted or {})
        self.call.send_command("strategy", text)

    def result(self, timeout: float | None = None) -> RunRecord:
        """Wait for the run, and return it compared with one device.

        Raises:
            CellError: a rank failed.
            KeyboardInterrupt: the caller was interrupted; the run has ended.
        """
        if self._record is None:
            try:
                with ended_on_interrupt(self.call):
                    reports = self._followed(timeout)
                self.poll()
                record = self._compared(reports)
            except TimeoutError:
                raise
            except BaseException as error:
                self._finish(replace(self.planned, error=str(error).strip() or repr(error)))
                raise
            self._record = self._finish(record)
        return self._record

    def _compared(self, reports: Sequence[RankResult]) -> RunRecord:
        """The record of the ranks' reports, with what the notebook has measured."""
        observer = RunObserver(lambda block: None, self._interrupted.is_set, self._interrupted.is_set)
        record = self.comparison.record(self, reports, observer)
        starts = [0, *(segment.first_step for segment in record.segments[1:]), math.inf]
        waited = [
            next((share for step, share in reversed(self._bubbles.items()) if start <= step < stop), None)
            for start, stop in pairwise(starts)
        ]
        parts = zip(record.segments, waited, strict=False)
        segments = tuple(replace(segment, bubble=share) for segment, share in parts)
        values = {name: tuple(pairs) for name, pairs in self._values.items()}
        return replace(record, bubble=waited[-1], segments=segments, values=values)

    def _followed(self, timeout: float | None) -> list[RankResult]:
        """The ranks' reports; meanwhile the run's file and log get its steps."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.call.done() and time.monotonic() < end:
            self.poll()
            with suppress(Exception):  # raised again below
                self.call.result(min(_POLL_S, max(0.0, end - time.monotonic())))
        return self.call.result(0.0)

    def _finish(self, record: RunRecord) -> RunRecord:
        self._log.close(record.error)
        file, self._file = self._file, None
        return file.finish(record) if file is not None else record
