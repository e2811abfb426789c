"""Runs a job on one device, and compares strategies with these runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workbench.core.metrics import Segment, StepBlock, difference
from workbench.core.not_finite import LossPair
from workbench.core.options import Options
from workbench.core.strategy import Strategy
from workbench.core.verdict import TOLERANCES, UNKNOWN, WEIGHT_STEPS, Case, Distance, Verdict
from workbench.errors import SessionError
from workbench.session.cluster import Session
from workbench.session.comparison import training_on_engine
from workbench.session.comparison.training_on_engine import OneDevice
from workbench.session.remote_call import RemoteCall, ended_on_interrupt
from workbench.training.runs.job import RankResult
from workbench.units import counted

_POLL_S = 0.1


class RunStopped(SessionError):
    """A run was stopped before its first step, while one device trained."""


@dataclass(frozen=True)
class RunObserver:
    """Callbacks while one device trains: ``listen`` gets its steps, ``is_stopped`` ends it after its current step,
    ``is_interrupted`` ends it in the middle of a step.
    """

    listen: Callable[[StepBlock], None]
    is_stopped: Callable[[], bool]
    is_interrupted: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class CheckedRun:
    """A run that is compared with one device.

    Attributes:
        reports: one per rank.
        num_steps: the number of first steps to compare.
        compiles: whether its step is compiled.
        observer: of the one-device runs that the comparison needs.
        weight_steps: see ``OneDevice``.
    """

    strategy: Strategy
    reports: Sequence[RankResult]
    num_steps: int
    seed: int = 0
    compiles: bool = False
    observer: RunObserver | None = None
    weight_steps: int = WEIGHT_STEPS

    @property
    def which(self) -> OneDevice:
        """The one-device run that it is compared with."""
        return one_device_of(self.strategy, self.seed, self.weight_steps)

    @property
    def changes(self) -> Sequence[tuple[int, str]]:
        """(step, strategy) for every change of its strategy."""
        return self.reports[0].changes


class Checker:
    """Trains a job on one device, on engine 0, for as many steps as a check needs, and remembers the results.

    Args:
        key: the engines' key of the job.
    """

    def __init__(self, session: Session, key: str) -> None:
        self._session, self._key = session, key
        self._reports: dict[OneDevice, RankResult] = {}
        # By a strategy's text, and whether its step is compiled: compared steps that are equal, and results in float64.
        self._equal: dict[tuple[str, bool], int] = {}
        self._exact: dict[tuple[str, bool], tuple[int, Distance]] = {}

    def one_device(self, which: OneDevice, num_steps: int, observer: RunObserver | None = None) -> RankResult:
        """A one-device run of at least so many steps. The first call trains it.

        Raises:
            RunStopped: ``observer`` stopped it; the next call trains it again.
        """
        known = self._reports.get(which)
        if known is not None and len(known.losses) >= num_steps:
            return known
        call = self._session.submit(training_on_engine.train_one_device, self._key, which, num_steps, ranks=[0])
        report: RankResult = _finished(call, observer)[0]
        if len(report.losses) < num_steps:
            raise RunStopped(f"stopped while one device trained, after its step {len(report.losses)}")
        self._reports[which] = report
        return report

    def forget(self) -> None:
        """Drop all results: the engine that held them has been replaced."""
        self._reports.clear()
        self._equal.clear()
        self._exact.clear()

    def known(self, which: OneDevice) -> RankResult | None:
        """This one-device run; None if it has not been trained."""
        return self._reports.get(which)

    def verdict(self, run: CheckedRun) -> Verdict:
        """Whether a run equals one device in the steps to compare, or until it changed to a strategy that another
        one-device run belongs to.

        Further runs, on one device with perturbed weights and of both in float64, are made only if the question is open
        without them and the observer has not stopped. Results in fp32 or float64 serve all precisions of a strategy.
        """
        which, reports = run.which, run.reports
        others = (
            step for step, text in run.changes if one_device_of(Strategy(text), run.seed, run.weight_steps) != which
        )
        steps = min(run.num_steps, next(others, run.num_steps))
        if steps < min(WEIGHT_STEPS, len(reports[0].losses)):  # the weights are those of a later step
            reports = [replace(report, tensors=()) for report in reports]
        verdict = replace(self._verdict(replace(run, reports=reports, num_steps=steps)), num_steps=steps)
        if steps == run.num_steps:
            return verdict
        return verdict.with_note(
            counted(steps, "step") if verdict.equal is not None else "",
            f"compared until the change before step {steps + 1}: one device had mb={which.num_micro_batches}, "
            f"{which.precision}",
        )

    def judged(self, segments: Sequence[Segment], run: CheckedRun) -> tuple[Segment, ...]:
        """The segments of a run that is not equal, each with the verdict on the compared steps until its end.

        The first one that is not equal is the last one with a verdict of its own.
        """
        found = list(segments)
        for i, stop in enumerate(segment.first_step for segment in segments[1:]):
            if stop >= run.num_steps:
                break
            until = [
                replace(report, losses=report.losses[:stop], tensors=report.tensors if stop >= WEIGHT_STEPS else ())
                for report in run.reports
            ]
            verdict = self.verdict(replace(run, reports=until, num_steps=stop)) if stop else None
            found[i] = replace(segments[i], verdict=verdict)
            if verdict is not None and not verdict.equal:
                break
        return tuple(found)

    def _verdict(self, run: CheckedRun) -> Verdict:
        """See ``verdict``; in these steps there is one reference."""
        own, reference = run.reports[0].losses, self.known(run.which)
        if reference is None or not run.num_steps:
            return LossPair(own, (), 0).described(UNKNOWN)
        losses = LossPair(own, reference.losses, run.num_steps)
        if not losses.num_compared:
            return losses.described(Verdict(None, text="there was nothing to compare"))
        wide = run.strategy.with_options(precision="fp32")
        is_equal_in_fp32 = self._equal.get((str(wide), run.compiles), 0) >= losses.num_compared
        equal_in = "fp32" if wide != run.strategy and is_equal_in_fp32 and not run.changes else ""
        distance = _distance(run.reports, reference, losses.num_compared)
        case = Case(distance, TOLERANCES[reference.precision], equal_in=equal_in)
        try:
            while not losses.is_unlike and (evidence := case.missing()) is not None:
                steps = min(case.num_steps(evidence), run.num_steps)
                if evidence == "noise":
                    case = replace(case, noise=self._noise(run.which, reference, steps, run.observer))
                else:
                    case = self._check_in_float64(case, run, steps)
        except RunStopped:
            return losses.described(Verdict(None, text="not judged: stopped before the question was settled"))
        except SessionError as error:  # the run itself is complete
            return losses.described(Verdict(None, text=f"not judged: one device failed in the check: {_cause(error)}"))
        verdict = self._with_micro_batches(losses.described(case.verdict()), run.which, reference)
        if verdict.equal and reference.precision == "fp32" and not run.changes:
            known = self._equal.get((str(run.strategy), run.compiles), 0)
            self._equal[str(run.strategy), run.compiles] = max(known, losses.num_compared)
        return verdict

    def _with_micro_batches(self, verdict: Verdict, which: OneDevice, reference: RankResult) -> Verdict:
        """The verdict, noting that one device has other losses with these micro-batches than with whole batches."""
        whole = self.known(replace(which, num_micro_batches=1))
        if whole is None or verdict.equal is None:
            return verdict
        ours, theirs = reference.losses[0], whole.losses[0]
        if difference(ours, theirs) <= TOLERANCES[reference.precision].loss:
            return verdict
        number = which.num_micro_batches
        return verdict.with_note(
            f"both mb={number}",
            f"one device had {number} micro-batches, too: its first loss is {ours:.4g}, that of whole batches "
            f"{theirs:.4g} (batch norm and dropout see one micro-batch at a time)",
        )

    def _noise(self, which: OneDevice, reference: RankResult, num_steps: int, observer: RunObserver | None) -> Distance:
        """The distance of one device from itself when its first weights change by a rounding unit.

        The number of micro-batches changes it little, so the noise of another number is reused.
        """
        for other, report in self._reports.items():
            plain = self.known(replace(other, variant="plain"))
            is_like = replace(other, num_micro_batches=which.num_micro_batches) == replace(which, variant="perturbed")
            if is_like and plain is not None and len(report.losses) >= num_steps:
                return _distance([report], plain, num_steps)
        report = self.one_device(replace(which, variant="perturbed"), num_steps, observer)
        return _distance([report], reference, num_steps)

    def _check_in_float64(self, case: Case, run: CheckedRun, num_steps: int) -> Case:
        """The case with the strategy's results in fp32 or float64, or with the reason why there are none."""
        changed = run.changes[0][0] if run.changes else num_steps
        if changed < num_steps:
            return replace(case, no_float64=f"float64 was not tried: the strategy changed after step {changed}")
        weight_steps = min(run.weight_steps, num_steps)
        which = replace(run.which, precision="fp32", variant="float64", weight_steps=weight_steps)
        wide = str(run.strategy.with_options(precision="fp32"))
        known_steps, exact = self._exact.get((wide, run.compiles), (0, Distance()))
        if known_steps >= num_steps:
            return replace(case, exact=exact)
        try:
            reference = self.one_device(which, num_steps, run.observer)
            train, given = training_on_engine.train_strategy, (self._key, wide, which, num_steps, run.compiles)
            found = _finished(self._session.submit(train, *given), run.observer)
        except RunStopped:
            raise
        except SessionError as error:
            return replace(case, no_float64=f"the model does not run in float64: {_cause(error)}")
        exact = _distance(found, reference, num_steps)
        if not replace(case, exact=exact).verdict().equal:
            perturbed = self.one_device(replace(which, variant="perturbed float64"), weight_steps, run.observer)
            exact = exact.beyond(_distance([perturbed], reference, weight_steps))
        self._exact[wide, run.compiles] = num_steps, exact
        return replace(case, exact=exact)


def one_device_of(strategy: Strategy | None, seed: int, num_steps: int) -> OneDevice:
    """The one-device run with which so many first steps of a strategy's run are compared; None: with whole batches."""
    options = strategy.options if strategy is not None else Options()
    weight_steps = min(WEIGHT_STEPS, num_steps)
    return OneDevice(options.num_micro_batches, options.precision, seed=seed, weight_steps=weight_steps)


def _cause(error: SessionError) -> str:
    return str(error).strip().splitlines()[-1]


def _distance(reports: Sequence[RankResult], reference: RankResult, num_steps: int) -> Distance:
    pairs = list(zip(reports[0].losses, reference.losses, strict=False))[:num_steps]
    tensors = next((report.tensors for report in reports if report.tensors), ())
    return Distance(tuple(difference(own, other) for own, other in pairs), tensors)


def _finished(call: RemoteCall, observer: RunObserver | None) -> list[RankResult]:
    """The ranks' reports, with the observer's look at the steps meanwhile. An interrupt of the caller ends the run."""
    with ended_on_interrupt(call):
        if observer is not None:
            _observe(call, observer)
        return call.result()


def _observe(call: RemoteCall, observer: RunObserver) -> None:
    """Pass the steps of a one-device run to the observer until it ends, and pass a stop to the run."""
    has_stopped = False
    while not call.done():
        time.sleep(_POLL_S)
        if observer.is_stopped() and not has_stopped:
            has_stopped = True
            call.send_command("stop")
        if observer.is_interrupted():
            call.cancel()
            raise RunStopped("stopped while one device trained, in the middle of a step")
        for _, message in call.messages():
            if isinstance(message, StepBlock):
                observer.listen(message)
