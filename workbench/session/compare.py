"""``wb.compare``: several strategies, the same weights and batches, each checked against one device.

The job (model, data, loss, optimizer) travels to the engines once. One engine first trains on one device in plain
torch: that run is the truth, for losses and weights, and the measure of speed-up.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from workbench.core.metrics import RunRecord, StepMetrics
from workbench.core.presets import PRESETS, preset
from workbench.core.strategy import Layer, Strategy
from workbench.errors import SessionError, StrategyError
from workbench.runtime.parallel import describe
from workbench.runtime.train import CHECKED_STEPS, WARM_UP_STEPS, Job, num_samples_of
from workbench.session import training
from workbench.session.calls import RemoteCall
from workbench.session.cluster import Session, current

if TYPE_CHECKING:
    import pandas as pd

TOLERANCE = 1e-5
"""Largest difference to one device over the first ``CHECKED_STEPS`` steps of a run that counts as
equal: of its losses and,
under SGD, of the weights after them."""
StrategyLike = Strategy | str
_keys = itertools.count()


@dataclass
class CompareResult:
    """Finished runs of one comparison.

    Attributes:
        baseline: the one-device run.
        runs: one record per strategy, in the order in which they ran; failed ones carry their reason.
        settings: what was compared: batch size, steps, engines, optimizer, versions.
    """

    baseline: RunRecord
    runs: list[RunRecord]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def all_equal(self) -> bool:
        """Whether every strategy ran and gave the numbers of one device."""
        return all(run.error is None and run.equal is True for run in self.runs)

    @property
    def table(self) -> pd.DataFrame:
        """One row per strategy, the one-device run last; bytes and seconds in SI units, differences absolute."""
        import pandas

        return pandas.DataFrame([_table_row(run, run is self.baseline) for run in [*self.runs, self.baseline]])

    def to_json(self) -> str:
        """The whole result as JSON text."""
        runs = [run.to_dict() for run in self.runs]
        return json.dumps({"baseline": self.baseline.to_dict(), "runs": runs, "settings": self.settings}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> CompareResult:
        """The result that ``to_json`` wrote."""
        data = json.loads(text)
        runs = [RunRecord.from_dict(run) for run in data["runs"]]
        return cls(RunRecord.from_dict(data["baseline"]), runs, data.get("settings", {}))

    def _repr_html_(self) -> str:
        return str(self.table.to_html(index=False, float_format=lambda value: f"{value:.3g}"))

    def __repr__(self) -> str:
        return f"CompareResult of {len(self.runs)} strategies:\n{self.table.to_string(index=False)}"


def _table_row(run: RunRecord, is_baseline: bool) -> dict[str, Any]:
    return {
        "strategy": run.name,
        "text": run.strategy,
        "engines": run.num_ranks,
        "samples_per_s": run.samples_per_s,
        "speedup": run.speedup,
        "peak_memory_bytes": max(run.peak_memory_bytes, default=None),
        "parameter_bytes": max((kinds.get("parameters", 0) for kinds in run.memory_by_kind), default=None),
        "activation_bytes": max((kinds.get("activations", 0) for kinds in run.memory_by_kind), default=None),
        "boxed_bytes_per_step": run.boxed_bytes_per_step,
        "loss_difference": 0.0 if is_baseline else run.loss_difference,
        "weight_difference": 0.0 if is_baseline else run.weight_difference,
        "equal": True if is_baseline else run.equal,
        "error": run.error,
    }


class Comparison:
    """A job on the engines of a session, its one-device runs, and the strategies tried on it so far.

    ``wb.compare`` and the panel are both made of this. Close it (or use it as a context) to free the engines' copies.
    """

    def __init__(
        self,
        session: Session,
        model_fn: Callable[[], Any],
        dataset: Any,
        loss_fn: Callable[[Any, Any], Any],
        *,
        optimizer_fn: Callable[[Any], Any] | None = None,
        batch_size: int,
        steps: int,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or steps < 1:
            raise ValueError(f"batch_size={batch_size}, steps={steps}: both are at least 1.")
        if batch_size > num_samples_of(dataset):
            raise ValueError(f"batch_size={batch_size}, but the data set has {num_samples_of(dataset)} samples.")
        self.session = session
        self.job = Job(model_fn, dataset, loss_fn, optimizer_fn, batch_size, steps, seed)
        self.key = f"{os.getpid()}-{next(_keys)}"
        model = self.job.model()
        self.layers: list[Layer] = describe(model)
        self.checks_weights = type(self.job.optimizer(model)).__name__ == "SGD"
        self._truths: dict[int, training.RankReport] = {}
        session.submit(training.keep_job, self.key, self.job).result()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engines' copies of the job."""
        self.session.submit(training.forget_job, self.key).result()

    def strategy(self, wanted: StrategyLike) -> Strategy:
        """A strategy from a preset's name, a text or itself, checked against the model.

        Raises:
            StrategyError: it does not fit the model or the number of engines.
        """
        if isinstance(wanted, str):
            wanted = preset(wanted, self.layers, self.session.num_engines) if wanted in PRESETS else Strategy(wanted)
        wanted.resolve(self.layers, self.session.num_engines)
        return wanted

    def truth(self, num_micro_batches: int = 1) -> training.RankReport:
        """The one-device run with so many micro-batches, made on engine 0 when it is first asked for."""
        if num_micro_batches not in self._truths:
            call = self.session.submit(training.train_one_device, self.key, num_micro_batches, ranks=[0])
            self._truths[num_micro_batches] = call.result()[0]
        return self._truths[num_micro_batches]

    def baseline(self) -> RunRecord:
        """The one-device run as a record."""
        return self._record("one device", "plain torch, no parallelism", [self.truth()], num_ranks=1)

    def start(self, wanted: StrategyLike, name: str | None = None) -> TrainingRun:
        """Start a run and return at once; the truth it is checked against is trained first, if it is not there yet."""
        strategy = self.strategy(wanted)
        label = name or (wanted if isinstance(wanted, str) and wanted in PRESETS else str(strategy))
        self.truth(1)
        self.truth(strategy.options.num_micro_batches)
        call = self.session.submit(training.train_strategy, self.key, str(strategy), strategy.options.num_micro_batches)
        return TrainingRun(self, label, strategy, call)

    def record(self, name: str, strategy: Strategy, reports: Sequence[training.RankReport]) -> RunRecord:
        """A finished run, compared with one device."""
        run = self._record(name, str(strategy), reports, self.session.num_engines)
        truth = self.truth(strategy.options.num_micro_batches)
        pairs = list(zip(run.losses, truth.losses, strict=False))[:CHECKED_STEPS]
        loss_difference = max((_distance(a, b) for a, b in pairs), default=None)
        weight_difference = next((r.weight_difference for r in reports if r.weight_difference is not None), None)
        compared = [loss_difference] + ([weight_difference] if self.checks_weights else [])
        equal = None if loss_difference is None else all(d is None or d <= TOLERANCE for d in compared)
        return replace(run, loss_difference=loss_difference, weight_difference=weight_difference, equal=equal)

    def _record(self, name: str, text: str, reports: Sequence[training.RankReport], num_ranks: int) -> RunRecord:
        slowest = [max(times) for times in zip(*(report.step_times_s for report in reports), strict=False)]
        rate = self._samples_per_s(slowest)
        return RunRecord(
            name,
            text,
            num_ranks,
            self.job.batch_size,
            reports[0].losses,
            tuple(slowest),
            rate,
            rate / self._samples_per_s(self.truth().step_times_s),
            tuple(report.memory_bytes["peak"] for report in reports),
            tuple({k: v for k, v in report.memory_bytes.items() if k != "peak"} for report in reports),
            sum(report.boxed_bytes for report in reports),
        )

    def _samples_per_s(self, times: Sequence[float]) -> float:
        steady = list(times)[WARM_UP_STEPS + 1 :] or list(times)
        return self.job.batch_size / statistics.median(steady)


class TrainingRun:
    """One strategy being trained; the notebook goes on meanwhile."""

    def __init__(self, comparison: Comparison, name: str, strategy: Strategy, call: RemoteCall) -> None:
        self.comparison, self.name, self.strategy, self.call = comparison, name, strategy, call

    def poll(self) -> list[StepMetrics]:
        """Records that arrived since the last call, of all ranks."""
        return [message for _, message in self.call.messages() if isinstance(message, StepMetrics)]

    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.call.done()

    def stop(self) -> None:
        """Ask the run to end at the next step that reports; its figures so far are kept."""
        self.call.request_stop()

    def result(self, timeout: float | None = None) -> RunRecord:
        """The finished run, compared with one device; waits for it.

        Raises:
            CellError: a rank failed.
        """
        return self.comparison.record(self.name, self.strategy, self.call.result(timeout))


def start_run(
    session: Session,
    model_fn: Callable[[], Any],
    dataset: Any,
    loss_fn: Callable[[Any, Any], Any],
    strategy: StrategyLike,
    *,
    optimizer_fn: Callable[[Any], Any] | None = None,
    batch_size: int,
    steps: int,
    seed: int = 0,
    name: str | None = None,
) -> TrainingRun:
    """Start training one strategy and return at once; see ``Comparison`` for several on the same job."""
    comparison = Comparison(
        session, model_fn, dataset, loss_fn, optimizer_fn=optimizer_fn, batch_size=batch_size, steps=steps, seed=seed
    )
    return comparison.start(strategy, name)


def compare(
    model_fn: Callable[[], Any],
    dataset: Any,
    loss_fn: Callable[[Any, Any], Any],
    strategies: Iterable[StrategyLike] | Mapping[str, StrategyLike],
    *,
    optimizer_fn: Callable[[Any], Any] | None = None,
    batch_size: int,
    steps: int = 20,
    session: Session | None = None,
    seed: int = 0,
    progress: bool = True,
) -> CompareResult:
    """Train a model under several strategies, from the same weights on the same batches, and check each against one
    device.

    Args:
        model_fn: makes the model; called on every engine after seeding.
        dataset: an (inputs, targets) pair of tensors or arrays, or a torch Dataset of pairs.
        loss_fn: (output, target) -> scalar, a mean over the samples.
        strategies: preset names (data, model, pipeline, hybrid), texts or ``wb.Strategy``; or a dict name -> one of
        these.
        optimizer_fn: parameters -> torch optimizer; default SGD with lr 0.1 and momentum 0.9.
        batch_size: samples per step, over all engines.
        steps: training steps per strategy.
        session: where to run; default the current one, else one with 2 engines for the time of the call.
        seed: of the weights and of the order of the data.
        progress: print a line per strategy to standard error.

    Returns:
        A result whose ``.table`` is a pandas table.

    Raises:
        StrategyError: a strategy does not fit; nothing has run then.

    ``wb.compare(make_mlp, digits(), F.cross_entropy, ["data", "model"], batch_size=128).table`` has a row for each.
    """
    named = _named(strategies)
    with (
        _session(session) as used,
        Comparison(
            used, model_fn, dataset, loss_fn, optimizer_fn=optimizer_fn, batch_size=batch_size, steps=steps, seed=seed
        ) as comparison,
    ):
        checked = {name: comparison.strategy(strategy) for name, strategy in named.items()}
        say = _Progress(len(checked)) if progress else None
        baseline = comparison.baseline()
        runs = [_run_to_end(comparison, name, strategy, say) for name, strategy in checked.items()]
        return CompareResult(baseline, runs, _settings(comparison))


def _named(strategies: Iterable[StrategyLike] | Mapping[str, StrategyLike]) -> dict[str, StrategyLike]:
    if isinstance(strategies, Mapping):
        named = dict(strategies)
    else:
        listed = [strategies] if isinstance(strategies, (str, Strategy)) else list(strategies)
        named = {str(strategy): strategy for strategy in listed}
    if not named:
        raise StrategyError(
            f"compare: no strategy given. Give some of {', '.join(PRESETS)}, or texts such as '*: data'."
        )
    return named


@contextmanager
def _session(session: Session | None) -> Any:
    existing = session or current()
    with nullcontext(existing) if existing is not None else Session(engines=2) as used:
        yield used


def _run_to_end(comparison: Comparison, name: str, strategy: Strategy, say: _Progress | None) -> RunRecord:
    started = time.perf_counter()
    try:
        run = comparison.start(strategy, name)
        record = run.result()
    except SessionError as error:  # one strategy that fails must not take the others' results with it
        record = RunRecord(
            name, str(strategy), comparison.session.num_engines, comparison.job.batch_size, error=str(error)
        )
    if say is not None:
        say(record, time.perf_counter() - started)
    return record


class _Progress:
    """A line per finished strategy on standard error."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __call__(self, run: RunRecord, time_s: float) -> None:
        self.done += 1
        verdict = "failed" if run.error else "equal to one device" if run.equal else "NOT equal to one device"
        print(
            f"[{self.done}/{self.total}] {run.name}: {run.samples_per_s:.0f} samples/s, {verdict} ({time_s:.1f} s)",
            file=sys.stderr,
        )


def _settings(comparison: Comparison) -> dict[str, Any]:
    import torch

    job = comparison.job
    return {
        "model": getattr(job.model_fn, "__name__", type(job.model_fn).__name__),
        "num_parameters": sum(layer.num_parameters for layer in comparison.layers),
        "batch_size": job.batch_size,
        "steps": job.num_steps,
        "engines": comparison.session.num_engines,
        "optimizer": _optimizer_text(job.optimizer_fn),
        "seed": job.seed,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "tolerance": TOLERANCE,
    }


def _optimizer_text(optimizer_fn: Any) -> str:
    """The optimizer's source line, where there is one to show."""
    if optimizer_fn is None:
        return "SGD(lr=0.1, momentum=0.9)"
    try:
        return inspect.getsource(optimizer_fn).strip()
    except (OSError, TypeError):
        return getattr(optimizer_fn, "__name__", repr(optimizer_fn))


def _distance(a: float, b: float) -> float:
    return abs(a - b) if a == a and b == b else float("inf") if (a == a) != (b == b) else 0.0
