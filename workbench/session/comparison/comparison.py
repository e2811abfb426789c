"""A job on the engines of a session, with its one-device runs and the runs of strategies.

The job (model, data, loss, optimizer) is sent to the engines once. One engine first trains on one device in plain
torch. This run is the reference for losses, weights and speed-up.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from workbench.core.metrics import RunRecord
from workbench.core.presets import preset_name
from workbench.core.seeds import with_seed
from workbench.core.strategy import Strategy
from workbench.core.verdict import CHECKED_STEPS, WEIGHT_STEPS
from workbench.errors import NotStartedError, RunError, SessionError
from workbench.session import user_modules
from workbench.session.cluster import Session
from workbench.session.comparison import training_on_engine
from workbench.session.comparison.checker import CheckedRun, Checker, RunObserver, one_device_of
from workbench.session.comparison.machine import machine_text, versions
from workbench.session.comparison.run_records import measured_record, now_text, segments_of
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.session.comparison.subject import StrategyLike, Subject
from workbench.session.comparison.training_on_engine import OneDevice
from workbench.session.comparison.training_run import TrainingRun
from workbench.session.remote_call import finished
from workbench.training.runs.job import RankResult
from workbench.writers.protocol import Writer
from workbench.writers.run_log import RunLog

NO_STRATEGY = "plain torch, no parallelism"
"""The one-device run has this text instead of a strategy."""
_keys = itertools.count()


class Comparison:
    """A job on the engines of a session, its one-device runs, and the strategies tried on it so far.

    ``wb.compare`` and the panel use it. Close it (or use it as a context) to free the engines' copies.

    Args:
        check_steps: number of first steps that one device trains and that later runs are compared with; 0 for none.
        log: the writers of the runs' logs.

    Attributes:
        compiles: whether runs that start from now on compile their step.
        seed: their seed; `use_seed` changes it.
    """

    def __init__(
        self,
        session: Session,
        subject: Subject,
        keep: SavedRuns | None = None,
        check_steps: int = CHECKED_STEPS,
        log: Sequence[Writer] = (),
    ) -> None:
        self.session, self.subject, self.job = session, subject, subject.job
        self.key = f"{os.getpid()}-{next(_keys)}"
        self._checker = Checker(session, self.key)
        self.check_steps, self.compiles, self.seed = check_steps, False, self.job.seed
        self._keep, self._writers = keep, tuple(log)
        self._baseline: RunRecord | None = None
        self._num_threads, self._no_micro_batches = 0, ""
        self._checkers: WeakKeyDictionary[TrainingRun, Checker] = WeakKeyDictionary()
        self._versions: dict[str, user_modules.Version] = {}
        if session.is_busy:  # perhaps with a panel's run that is paused
            session.report_wait()
        self.prepare()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Send the job to engines that do not have it: first to all, later to new ones after a restart or a loss. If
        the engine of the one-device run is new, the run is trained again. So it is where modules of the user's have
        changed meanwhile, and all engines get the job again, with the new code.

        Raises:
            NotStartedError: the session is closed.
            SessionError: the job has functions, classes or objects of a module as it was before it was loaded again.
        """
        has_job = self._on_engines(training_on_engine.has_job, self.key)
        missing = [rank for rank, has in enumerate(has_job) if not has]
        versions = user_modules.loaded()
        has_changed = any(not versions.get(name, old).has_code_of(old) for name, old in self._versions.items())
        if has_changed:
            self._refuse_old_code()
            missing = list(range(len(has_job)))
            self.job.begun.clear()  # the new code may make other weights
        if missing:
            prepared = self._on_engines(training_on_engine.keep_job, self.key, self.job, ranks=missing)
            self._num_threads = max(engine.num_threads for engine in prepared)
            self._no_micro_batches = prepared[0].no_micro_batches
        if has_changed:
            self._forget_one_device()
            self._checker = Checker(self.session, self.key)  # runs of the old code keep theirs, which knows nothing
        elif 0 in missing:
            self._checker.forget()
        self._versions = versions

    def _refuse_old_code(self) -> None:
        for name in ("model_fn", "dataset", "loss_fn", "optimizer_fn", "collate_fn", "count"):
            if file := user_modules.outdated(getattr(self.job, name)):
                raise SessionError(
                    f"{file} has changed since this panel or comparison was made: its {name} is still of the old file. "
                    "Run the cell that makes it again."
                )

    def _forget_one_device(self) -> None:
        self._baseline = None
        self._checker.forget()
        self._on_engines(training_on_engine.forget_one_device, self.key, ranks=[0])

    def _on_engines(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        try:
            return finished(self.session.submit(function, *args, ranks=ranks))
        except NotStartedError as error:
            raise NotStartedError(
                "These runs are of a session that is closed: its engines have ended. Start engines again (%workbench "
                "start, or wb.Session()), and run the cell that makes this panel or comparison once more, with them."
            ) from error

    def use_seed(self, seed: int) -> None:
        """Give this seed to the runs that start from now on. Those of before have ended: the one-device runs with which
        they are compared hold the weights of models, and are freed.
        """
        if seed != self.seed:
            self.seed = seed
            self._forget_one_device()

    def close(self) -> None:
        """Free the engines' copies of the job. Engines that are gone, and cannot be started again, have none."""
        with suppress(SessionError):
            finished(self.session.submit(training_on_engine.forget_job, self.key))

    def strategy(self, wanted: StrategyLike) -> Strategy:
        """A strategy checked against the model, the number of engines and the loss.

        Raises:
            StrategyError: it does not fit, see `Subject.strategy`.
            RunError: it has micro-batches, and the mean of their losses is not the loss of the batch.
        """
        strategy = self.subject.strategy(wanted, self.session.num_engines)
        number = strategy.options.num_micro_batches
        if number > 1 and self._no_micro_batches:
            raise RunError(f"{self._no_micro_batches}; this one has {number}: {strategy}.")
        return strategy

    def reference(
        self, strategy: Strategy | None = None, observer: RunObserver | None = None, num_steps: int | None = None
    ) -> RankResult | None:
        """The first steps of one device, with a strategy's micro-batches and precision; the first call trains them.

        None with ``check_steps=0``.

        Raises:
            RunStopped: ``observer`` stopped it; the next call trains it again.
        """
        self.prepare()
        steps = min(self.check_steps, num_steps or self.job.num_steps)
        which = one_device_of(strategy, self.seed, steps)
        return self._checker.one_device(which, steps, observer) if steps else None

    def baseline(self, observer: RunObserver | None = None, num_steps: int | None = None) -> RunRecord | None:
        """The one-device run as a record; kept on disk like the others. None with ``check_steps=0``.

        Raises:
            RunStopped: as ``reference``.
        """
        reference = self.reference(None, observer, num_steps)
        if reference is None:
            return None
        if self._baseline is None or len(self._baseline.losses) < len(reference.losses):
            name = with_seed("one device", self.seed, self.job.seed)
            which = one_device_of(None, self.seed, len(reference.losses))
            record = self._measured(self._checker, name, NO_STRATEGY, [reference], 1, which)
            self._baseline = self._keep.begin(record).finish(record) if self._keep is not None else record
            log = self.log(record)
            log.add_record(record)
            log.close()
        return self._baseline

    def start(
        self,
        wanted: StrategyLike,
        name: str | None = None,
        predicted: Mapping[str, float] | None = None,
        num_steps: int | None = None,
    ) -> TrainingRun:
        """Start a run and return at once. Its reference is trained first, if it is missing.

        ``predicted`` is the prediction of the run, kept with its record (see ``RunRecord``). ``num_steps`` replaces the
        job's number of steps.
        """
        strategy = self.strategy(wanted)
        steps = num_steps or self.job.num_steps
        label = name or (wanted if isinstance(wanted, str) and preset_name(wanted) else str(strategy))
        self.prepare()  # also where nothing is to be compared
        self.reference(None, None, steps)
        self.reference(strategy, None, steps)
        planned = self.planned(label, strategy, predicted)
        planned = replace(planned, settings={**planned.settings, "steps": steps, "compiled": self.compiles})
        file = self._keep.begin(planned) if self._keep is not None else None
        description = f"training run {label!r}"
        call = self.session.submit(
            training_on_engine.train_strategy,
            self.key,
            str(strategy),
            one_device_of(strategy, self.seed, min(self.check_steps, steps)),
            steps,
            self.compiles,
            label=description,
        )
        run = TrainingRun(self, planned, strategy, call, file, self.log(planned))
        self._checkers[run] = self._checker
        return run

    def log(self, planned: RunRecord) -> RunLog:
        """The log of a run, where the comparison's writers keep it."""
        of_run = {"strategy": planned.strategy, "ranks": planned.num_ranks}
        return RunLog(self._writers, planned.name, {**of_run, **planned.settings})

    def first_difference(self, strategy: StrategyLike, seed: int | None = None) -> str:
        """Where the first step under a strategy parts from one device, see ``wb.debug.first_difference``."""
        text, of = str(self.strategy(strategy)), self.seed if seed is None else seed
        self.prepare()
        return self._on_engines(training_on_engine.find_first_difference, self.key, text, of)[0]

    def planned(
        self, name: str, strategy: Strategy, predicted: Mapping[str, float] | None = None, error: str | None = None
    ) -> RunRecord:
        """The record of a run before it begins; with ``error``, of a run that cannot begin."""
        return RunRecord(
            name,
            str(strategy),
            self.session.num_engines,
            self.job.batch_size,
            error=error,
            predicted=dict(predicted or {}),
            settings=self.settings(),
            started=now_text(),
        )

    def settings(self) -> dict[str, Any]:
        """Batch size, steps, engines, optimizer and versions of the comparison."""
        return {
            **self.subject.settings(),
            "seed": self.seed,
            "engines": self.session.num_engines,
            "threads": self._num_threads,
            "device": self.session.device,
            "check_steps": self.check_steps,
            "machine": machine_text(),
            **{name.lower(): number for name, number in versions().items()},
        }

    def record(self, run: TrainingRun, reports: Sequence[RankResult], observer: RunObserver | None = None) -> RunRecord:
        """A finished run, compared with one device: the losses of the first steps, and how they change the weights."""
        planned = run.planned
        seed, compiles = planned.settings["seed"], planned.settings.get("compiled", False)
        checker = self._checkers[run]
        num_steps = min(planned.settings["check_steps"], planned.settings["steps"])
        whole = one_device_of(None, seed, num_steps)
        found = self._measured(checker, planned.name, planned.strategy, reports, planned.num_ranks, whole)
        checked = CheckedRun(run.strategy, reports, num_steps, seed, compiles, observer, whole.weight_steps)
        verdict = checker.verdict(checked)
        segments = segments_of(planned, found, reports, run.announced)
        if verdict.equal is False and segments:  # the strategies before the mistake are equal
            segments = checker.judged(segments, replace(checked, num_steps=verdict.num_steps))
        weights = next((r.weight_difference for r in reports if r.weight_difference is not None), None)
        return replace(
            found,
            predicted=planned.predicted,
            settings={**planned.settings, **({"uncompiled": reports[0].uncompiled} if reports[0].uncompiled else {})},
            started=planned.started,
            changes=tuple(reports[0].changes),
            loss_difference=verdict.largest,
            weight_difference=weights if verdict.num_steps >= min(WEIGHT_STEPS, len(found.losses)) else None,
            equal=verdict.equal,
            verdict=verdict,
            segments=segments,
        )

    def _measured(
        self, checker: Checker, name: str, text: str, reports: Sequence[RankResult], num_ranks: int, which: OneDevice
    ) -> RunRecord:
        reference = checker.known(which)
        return measured_record(name, text, reports, num_ranks, self.job.batch_size, reference, self.settings())
