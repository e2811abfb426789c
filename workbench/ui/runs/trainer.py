"""Starts the panel's runs on the engines of a session; the one-device run comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from workbench.core.metrics import RunRecord, StepBlock
from workbench.core.presets import StrategyLike, strategy_of
from workbench.core.profile import Profile
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
from workbench.core.verdict import CHECKED_STEPS
from workbench.session.comparison.checker import RunObserver, RunStopped
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.session.comparison.subject import Subject
from workbench.session.comparison.training_run import Message, TrainingRun
from workbench.ui.live.poller import Run
from workbench.writers.choose import Log, writers


@dataclass(frozen=True, slots=True)
class OneDeviceSteps:
    """Steps of the one-device run, reported before the run's own steps."""

    block: StepBlock


class Trainer(Protocol):
    """Describes one model and starts runs of it; ``baseline`` is the one-device run once there is one.

    One device trains the first ``check_steps`` steps too, for the comparison; 0 for none. ``compiles``: whether runs
    that start from now on compile their step. ``seed``: the seed of runs that are started without one.
    ``settings``: what it trains, as in ``RunRecord.settings``; empty if that is unknown.
    """

    layers: list[Layer]
    num_ranks: int
    sample_shape: tuple[int, ...]
    baseline: RunRecord | None
    check_steps: int
    compiles: bool
    seed: int
    settings: Mapping[str, Any]

    def start(
        self,
        strategy: Strategy,
        name: str,
        num_steps: int,
        predicted: Mapping[str, float] | None = None,
        seed: int | None = None,
    ) -> Run:
        """Begin to train; returns at once. ``predicted`` is kept with the run."""


class SessionTrainer:
    """Trains on a session's engines. Model, data and the one-device runs stay there between runs."""

    def __init__(
        self,
        session: Any,
        model_fn: Callable[[], Any],
        dataset: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
        *,
        strategy: StrategyLike | None = None,
        keep: SavedRuns | None = None,
        check_steps: int = CHECKED_STEPS,
        log: Log | None = None,
        **options: Any,
    ) -> None:
        """Arguments are those of ``wb.Panel``.

        Raises:
            StrategyError: ``strategy`` does not parse; it says so before the job goes to the engines.
        """
        begin = writers(log)
        subject = Subject.of(model_fn, dataset, loss_fn, **options)
        if strategy is not None:
            strategy_of(strategy, subject.layers, session.num_engines)
        self._comparison = Comparison(session, subject, keep, check_steps, begin)
        self.layers = subject.layers
        self.num_ranks: int = session.num_engines
        self.sample_shape = subject.sample_shape
        self.seed = subject.job.seed
        self.settings: Mapping[str, Any] = subject.settings()
        self.baseline: RunRecord | None = None

    @property
    def check_steps(self) -> int:
        """Number of first steps that one device trains too; a run keeps its number from its start."""
        return self._comparison.check_steps

    @check_steps.setter
    def check_steps(self, number: int) -> None:
        self._comparison.check_steps = number

    def first_difference(self, text: str, seed: int | None = None) -> str:
        """Where a strategy parts from one device in its first step, in a sentence. Waits for the engines."""
        return self._comparison.first_difference(text, seed)

    @property
    def compiles(self) -> bool:
        """Whether runs that start from now on compile their step."""
        return self._comparison.compiles

    @compiles.setter
    def compiles(self, value: bool) -> None:
        self._comparison.compiles = value

    def start(
        self,
        strategy: Strategy,
        name: str,
        num_steps: int,
        predicted: Mapping[str, float] | None = None,
        seed: int | None = None,
    ) -> Run:
        """Begin to train and return at once. A missing one-device run comes first."""
        own = self.seed if seed is None else seed

        def begin(observer: RunObserver) -> tuple[TrainingRun, Sequence[float]]:
            checked = self._comparison.strategy(strategy)
            self._comparison.use_seed(own)
            self.baseline = self._comparison.baseline(observer, num_steps)
            reference = self._comparison.reference(checked, observer, num_steps)
            run = self._comparison.start(checked, name, predicted, num_steps)
            return run, reference.losses if reference is not None else ()

        return _BackgroundRun(begin, self._comparison.strategy)


class _BackgroundRun:
    """A run that a thread starts. Until it has started, it reports the one-device run and stores requests. ``check``
    raises for a strategy that the run cannot take.
    """

    def __init__(
        self,
        begin: Callable[[RunObserver], tuple[TrainingRun, Sequence[float]]],
        check: Callable[[Strategy], Strategy],
    ) -> None:
        self._begin, self._check = begin, check
        self._first: SimpleQueue[StepBlock] = SimpleQueue()
        self._run: TrainingRun | None = None
        self._error: BaseException | None = None
        self._asked: list[Callable[[TrainingRun], None]] = []
        self._stopped, self._interrupted = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self.one_device_losses: Sequence[float] | None = None
        threading.Thread(target=self._start, name="workbench-start-run", daemon=True).start()

    def _start(self) -> None:
        observer = RunObserver(self._first.put, self._stopped.is_set, self._interrupted.is_set)
        try:
            run, losses = self._begin(observer)
            with self._lock:
                for order in self._asked:
                    order(run)
                if self._error is None:
                    self._run, self.one_device_losses = run, losses
                    return
            run.result()  # it was interrupted: nobody else ends its file and its logs
        except BaseException as error:  # noqa: BLE001 - raised again by result(), in the thread that asks
            self._error = self._error or error

    def _ask(self, order: Callable[[TrainingRun], None]) -> None:
        with self._lock:
            if self._run is None:
                self._asked.append(order)
            else:
                order(self._run)

    def poll(self) -> Sequence[Message | Profile | OneDeviceSteps]:
        first = [OneDeviceSteps(self._first.get()) for _ in range(self._first.qsize())]
        return [*first, *(self._run.poll() if self._run is not None else [])]

    def done(self) -> bool:
        return self._error is not None or (self._run is not None and self._run.done())

    def stop(self) -> None:
        self._stopped.set()
        self._ask(TrainingRun.stop)

    def interrupt(self) -> None:
        """End the run at once. A run that has not begun, because a cell holds the engines for example, counts as ended
        and is interrupted when it begins.
        """
        self._stopped.set()
        self._interrupted.set()
        self._ask(TrainingRun.interrupt)
        with self._lock:
            if self._run is None and self._error is None:
                self._error = RunStopped("stopped before it began")

    def pause(self) -> None:
        self._ask(TrainingRun.pause)

    def resume(self) -> None:
        self._ask(TrainingRun.resume)

    def profile(self) -> None:
        self._ask(TrainingRun.profile)

    def change(self, strategy: Strategy, name: str = "", predicted: Mapping[str, float] | None = None) -> None:
        checked = self._check(strategy)  # now: an error in a stored request would reach nobody who could mend it
        self._ask(lambda run: run.change(checked, name, predicted))

    def result(self) -> RunRecord:
        if self._error is not None:
            raise self._error
        assert self._run is not None
        return self._run.result()


def predictions(estimate: Any) -> Mapping[str, float]:
    """The numbers of an estimate for a record, see ``RunRecord.predicted``."""
    if estimate is None:
        return {}
    return {
        "step_s": estimate.step_s,
        "samples_per_s": estimate.samples_per_s,
        "peak_bytes": estimate.peak_bytes,
        "boxed_bytes": estimate.boxed_bytes,
        "bubble": estimate.bubble_s / estimate.step_s if estimate.step_s else 0.0,
    }
