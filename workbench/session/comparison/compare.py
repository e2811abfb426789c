"""``wb.compare``: several strategies, the same weights and batches, each checked against one device."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.core.json_record import finite, restore
from workbench.core.metrics import RunRecord
from workbench.core.presets import PRESETS
from workbench.core.seeds import over_seeds, seeds_of, with_seed
from workbench.core.strategy import Strategy
from workbench.core.verdict import CHECKED_STEPS
from workbench.errors import RunError, SessionError, StrategyError
from workbench.session.cluster import Session, find_current
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.session.comparison.subject import StrategyLike, Subject
from workbench.session.output.start_progress import progress_stream
from workbench.session.output.tracebacks import explained_interrupt
from workbench.units import format_bytes, format_number
from workbench.writers.choose import Log, writers

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class CompareResult:
    """Finished runs of one comparison.

    Attributes:
        baseline: the one-device run; None with ``check_steps=0``.
        runs: one record per strategy and seed, in the order in which they ran; failed ones carry their reason.
        settings: what was compared: batch size, steps, engines, optimizer, versions.
        more_baselines: the one-device runs of further seeds.
    """

    baseline: RunRecord | None
    runs: list[RunRecord]
    settings: dict[str, Any] = field(default_factory=dict)
    more_baselines: list[RunRecord] = field(default_factory=list)

    @property
    def baselines(self) -> list[RunRecord]:
        """The one-device runs, one per seed."""
        return [*([self.baseline] if self.baseline is not None else []), *self.more_baselines]

    @property
    def all_equal(self) -> bool:
        """Whether every strategy ran and gave the numbers of one device."""
        return all(run.error is None and run.equal is True for run in self.runs)

    @property
    def table(self) -> pd.DataFrame:
        """One row per strategy, the one-device run last; bytes and seconds in SI units, differences absolute.

        With several seeds a row has their means, and columns that end with ``_std`` their standard deviations.
        """
        import pandas

        return pandas.DataFrame([_table_row(run, is_truth) for run, is_truth in self._rows()])

    def _rows(self) -> list[tuple[RunRecord, bool]]:
        """One record per strategy, and whether it is of one device."""
        runs, truths = over_seeds(self.runs), over_seeds(self.baselines)
        return [*((run, False) for run in runs), *((truth, True) for truth in truths)]

    def to_json(self) -> str:
        """The whole result as JSON text. Numbers that are not finite are ``null``, and ``not_finite`` says where."""
        more, runs = ([run.to_dict() for run in listed] for listed in (self.more_baselines, self.runs))
        baseline = self.baseline and self.baseline.to_dict()
        parts = {"baseline": baseline, "more_baselines": more, "runs": runs, "settings": self.settings}
        plain, not_finite = finite(parts)
        return json.dumps({**plain, "not_finite": not_finite}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> CompareResult:
        """The result from the text of ``to_json``."""
        data = json.loads(text)
        restore(data, data.get("not_finite", {}))
        more, runs = ([RunRecord.from_dict(run) for run in data.get(name, [])] for name in ("more_baselines", "runs"))
        baseline = RunRecord.from_dict(data["baseline"]) if data["baseline"] else None
        return cls(baseline, runs, data.get("settings", {}), more)

    def _repr_html_(self) -> str:
        import pandas

        shown = pandas.DataFrame([_shown_row(run, is_truth) for run, is_truth in self._rows()])
        more = (
            "<code>result.table</code> has all columns; <code>wb.draw.runs(result)</code> sorts, filters and exports."
        )
        with pandas.option_context("display.max_colwidth", None):  # pandas cuts texts after 50 characters
            return f"{shown.to_html(index=False)}<p>{more}</p>"

    def __repr__(self) -> str:
        return f"CompareResult of {len(over_seeds(self.runs))} strategies:\n{self.table.to_string(index=False)}"


def _shown_row(run: RunRecord, is_baseline: bool) -> dict[str, str]:
    """The columns that people look at first, as they read them."""
    verdict = "reference" if is_baseline else _verdict(run)
    rate = f"{format_number(run.samples_per_s, grouping=',')}{_spread_text(run, 'samples_per_s')}"
    return {
        "strategy": run.name,
        "samples/s": rate if run.samples_per_s else "",
        "speed-up": f"{run.speedup:.2f}\u00d7" if run.speedup is not None else "",
        "peak per rank": format_bytes(max(run.peak_memory_bytes)) if run.peak_memory_bytes else "",
        "boxed per step": format_bytes(run.boxed_bytes_per_step) if run.error is None else "",
        "final loss": f"{run.final_loss:.4g}{_spread_text(run, 'final_loss')}" if run.final_loss is not None else "",
        "verdict": f"failed: {run.error.splitlines()[0]}" if run.error else verdict,
    }


def _spread_text(run: RunRecord, name: str) -> str:
    return f" \u00b1 {run.spread[name]:.2g}" if name in run.spread else ""


def _verdict(run: RunRecord) -> str:
    note = run.verdict.note
    if run.equal is None and note:
        return f"no verdict: {note}"
    return ", ".join(filter(None, (_VERDICTS[run.equal], note, run.settings.get("uncompiled"))))


def _table_row(run: RunRecord, is_baseline: bool) -> dict[str, Any]:
    return {
        "strategy": run.name,
        "text": run.strategy,
        "engines": run.num_ranks,
        "samples_per_s": run.samples_per_s,
        "speedup": run.speedup,
        "final_loss": run.final_loss,
        "rank_seconds": run.rank_seconds,
        **{f"{name}_std": value for name, value in run.spread.items() if name != "step_s"},
        "peak_memory_bytes": max(run.peak_memory_bytes, default=None),
        "parameter_bytes": max((kinds.get("parameters", 0) for kinds in run.memory_by_kind), default=None),
        "activation_bytes": max((kinds.get("activations", 0) for kinds in run.memory_by_kind), default=None),
        "boxed_bytes_per_step": run.boxed_bytes_per_step,
        "loss_difference": 0.0 if is_baseline else run.loss_difference,
        "weight_difference": 0.0 if is_baseline else run.weight_difference,
        "equal": True if is_baseline else run.equal,
        "verdict": "" if is_baseline else run.verdict.text,
        "error": run.error,
    }


def compare(
    model_fn: Callable[[], nn.Module],
    dataset: Any,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    strategies: Iterable[StrategyLike] | Mapping[str, StrategyLike] = PRESETS,
    *,
    batch_size: int,
    steps: int = 20,
    optimizer_fn: Callable[[Any], Optimizer] | None = None,
    seed: int = 0,
    seeds: int | Iterable[int] = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    count: Callable[[Any, Any], Any] | None = None,
    check_steps: int = CHECKED_STEPS,
    keep: bool | SavedRuns = True,
    log: Log | None = None,
    session: Session | None = None,
    engines: int = 2,
    progress: bool = True,
    compile: bool = False,
) -> CompareResult:
    """Train a model under several strategies, from the same weights on the same batches, and check each against one
    device.

    Args:
        model_fn: makes the model, ``() -> nn.Module``. Every engine calls it after seeding, anew for each run: the
            models begin with the same weights, and share none that they train.
        dataset: all samples in tensors or arrays: a tuple or dict of them, nested or not; or a Dataset whose items are
            tuples or dicts of these. A dict gives keyword arguments to the model, a tuple positional ones.
        loss_fn: (output, targets) -> scalar, a mean over the samples. The targets are a tuple's last entry, or a dict's
            ``label``, ``labels``, ``label_ids``, ``target`` or ``targets`` (several: as a dict); the model does not get
            them. None: the model returns its own loss, as its result, as ``.loss`` or ``["loss"]`` (transformers), or
            as a tuple's scalar, and gets all entries. Losses of micro-batches are weighted by their samples, on one
            device too.
        strategies: presets (data, model, pipeline, hybrid; also ``"pipeline | mb=8"``), texts, ``wb.Strategy``, dicts
            of rows or files of a text (``Path``), in a list; or a dict from names to these. Default: all presets.
        batch_size: samples per step, all ranks together.
        steps: training steps of each strategy.
        optimizer_fn: parameters -> torch optimizer. Default: SGD with lr 0.1 and momentum 0.9.
        seed: of the weights and of the order of the samples.
        seeds: train each strategy, and one device, so many times, with ``seed`` and the next numbers; or a list of
            seeds. Each run is compared with one device of its seed. Tables give means and standard deviations. Where
            one device fails with a later seed, the runs of that seed say so, and all others are kept.
        collate_fn: list of samples -> batch, as for torch's ``DataLoader``; for a Dataset or a list of samples.
        shuffle: a new order of the samples in every epoch, from the seed. False: the data set's order.
        drop_last: leave out a last batch of an epoch with fewer samples.
        count: (inputs, targets) -> the number of terms of a micro-batch's mean loss, if that is not its number of
            samples: for example, of words that count.
        check_steps: number of first steps that one device trains too, for the comparison; 0 for none.
        keep: keep the runs on disk, see ``wb.draw.SavedRuns``; a ``SavedRuns`` gives the folder.
        log: where the runs' steps are written too, such as ``"tensorboard:runs/"``, or a list of such places; see the
            guide "Keep logs where you keep them".
        session: the engines to train on. Default: the current session.
        engines: number of engines that the call starts, and ends, where no session runs.
        progress: print a line per strategy: below the cell in a notebook, elsewhere to standard error.
        compile: train each strategy once more with its step compiled (see ``wb.capture``), in a row beside the first:
            ``"data, compiled"``. Where there is no compiler, the step cannot be captured, or no step comes three times
            alike, the row says so.

    Returns:
        A result whose ``.table`` is a pandas table.

    Raises:
        StrategyError: some strategies do not fit; it has what is wrong with each.
        RunError: the model, data, loss or optimizer cannot be trained; for example, a batch has more samples than the
            data. Or no writer has the name in ``log``, or its package is not installed, or ``seeds`` are none. No
            engine was started, and nothing has run.

    ``wb.compare(make_mlp, digits(), F.cross_entropy, ["data", "model"], batch_size=128).table`` has a row for each.
    """
    named, numbers = _named(strategies), seeds_of(seed, seeds)
    saved = SavedRuns.of(keep)
    begin = writers(log)
    subject = Subject.of(
        model_fn, dataset, loss_fn, optimizer_fn=optimizer_fn, batch_size=batch_size, steps=steps, seed=numbers[0],
        collate_fn=collate_fn, shuffle=shuffle, drop_last=drop_last, count=count,
    )  # fmt: skip
    running = session or find_current()
    num_ranks = engines if running is None else running.num_engines
    checked = subject.strategies(named, num_ranks)
    kept = f"Runs that have ended are kept: {saved.code}" if saved is not None else "keep=True keeps runs as they end"
    with (
        explained_interrupt(f"wb.compare was interrupted, and returns no result. {kept}"),
        Session(engines) if running is None else nullcontext(running) as used,
        Comparison(used, subject, saved, check_steps, begin) as comparison,
    ):
        say = _Progress(len(checked) * (1 + compile) * len(numbers)) if progress else None
        settings, runs, baselines = comparison.settings(), list[RunRecord](), list[RunRecord | None]()
        for number in numbers:
            problem = ""
            try:
                comparison.use_seed(number)
                baselines.append(comparison.baseline())
            except (SessionError, RunError) as error:
                if not runs:
                    raise
                problem = f"one device failed with seed {number}: {error}"
            for name, strategy in checked.items():
                for comparison.compiles in (False, True) if compile else (False,):
                    title = f"{name}, compiled" if comparison.compiles else name
                    title = with_seed(title, number, numbers[0])
                    runs.append(_run_to_end(comparison, title, strategy, problem, say))
        return CompareResult(baselines[0], runs, settings, [one for one in baselines[1:] if one is not None])


def _named(strategies: Iterable[StrategyLike] | Mapping[str, StrategyLike]) -> dict[str, StrategyLike]:
    if isinstance(strategies, Mapping):
        named = dict(strategies)
        for name, strategy in named.items():
            if not isinstance(name, str):
                raise StrategyError(
                    f"compare(strategies={{{name!r}: {strategy!r}}}): the name {name!r} is of type "
                    f"{type(name).__name__}. Names stand in tables and files: give a text, such as {str(name)!r}."
                )
    else:
        listed = [strategies] if isinstance(strategies, (str, Strategy, os.PathLike)) else list(strategies)
        named = {str(Strategy(one) if isinstance(one, Mapping) else one): one for one in listed}
    if not named:
        raise StrategyError(
            f"compare: no strategy given. Give some of {', '.join(PRESETS)}, or texts such as '*: data'."
        )
    return named


def _run_to_end(
    comparison: Comparison, name: str, strategy: Strategy, problem: str, say: _Progress | None
) -> RunRecord:
    """The record of a run; of one that failed, or that a ``problem`` prevents, with the reason."""
    started = time.perf_counter()
    try:
        if problem:
            raise RunError(problem)
        record = comparison.start(strategy, name).result()
    except (SessionError, RunError) as error:  # a strategy that fails must not lose the results of the others
        record = comparison.planned(name, strategy, error=str(error))
    if say is not None:
        say(record, time.perf_counter() - started)
    return record


_VERDICTS = {True: "equal to one device", False: "NOT equal to one device", None: "not compared with one device"}


class _Progress:
    """A line per finished strategy."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __call__(self, run: RunRecord, time_s: float) -> None:
        self.done += 1
        verdict = "failed" if run.error else _verdict(run)
        rate = format_number(run.samples_per_s)
        print(
            f"[{self.done}/{self.total}] {run.name}: {rate} samples/s, {verdict} ({time_s:.1f} s)",
            file=progress_stream(),
        )


__all__ = ["CompareResult", "Comparison", "compare"]
