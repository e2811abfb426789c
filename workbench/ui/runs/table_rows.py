"""The comparison as rows of plain data, which the table shows, sorts, filters and exports. No widgets, no HTML."""

from __future__ import annotations

import csv
import io
import math
import operator
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from workbench.core.metrics import RunRecord
from workbench.ui.number_text import (
    DASH,
    NOT_CHECKED,
    percent,
    short_difference,
    signed_percent,
    speedup_text,
    three_digits,
)
from workbench.ui.runs.comparable import machine_of, task_of, timed_beside
from workbench.units import counted, format_bytes, format_seconds

TICK, CROSS = "\u2713", "\u2717"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: the key of its value, title, second line, and whether a smaller value is the better one."""

    key: str
    title: str
    detail: str = ""
    ascending: bool = False


COLUMNS = (
    Column("name", "strategy", "", ascending=True),
    Column("samples_per_s", "samples/s", "tick: predicted"),
    Column("speedup", "speed-up"),
    Column("peak_bytes", "peak", "per rank", ascending=True),
    Column("boxed_bytes", "boxed", "per step", ascending=True),
    Column("bubble", "bubble", "", ascending=True),
    Column("predicted_s", "step", "pred.", ascending=True),
    Column("step_s", "step", "meas.", ascending=True),
    Column("error", "error", "pred.", ascending=True),
    Column("rank_seconds", "cost", "rank s", ascending=True),
    Column("final_loss", "loss", "final", ascending=True),
    Column("loss_difference", "equal to", "1 device", ascending=True),
)


@dataclass(frozen=True)
class Row:
    """A run in the comparison. ``values`` are numbers in SI units or None, ``texts`` what people read, ``changes`` by
    how much numbers are more or less than the chosen baseline's, ``verdict`` why the run equals one device or not,
    ``note`` what its mark alone would hide. With several ``seeds``, ``values`` are means and ``spread`` has standard
    deviations. ``steps`` says how many were trained, if fewer than planned. ``peers`` is equal for measured runs of one
    task on one machine, and ``on_front`` says that none of those beats the run; see ``with_fronts``."""

    key: str
    name: str
    detail: str
    values: Mapping[str, float | None]
    texts: Mapping[str, str]
    is_baseline: bool = False
    is_truth: bool = False
    peers: Hashable = None
    on_front: bool = False
    equal: bool | None = None
    verdict: str = ""
    note: str = ""
    failure: str = ""
    started: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    steps: str = ""

    def spread_text(self, key: str) -> str:
        """The standard deviation of a value, as ``'\u00b1 2.10'``; empty where there is none."""
        return f"\u00b1 {_WRITERS[key](self.spread[key])}" if key in self.spread else ""


def key_of(run: RunRecord) -> str:
    """The key of a run: the id of its file, or its name without a file."""
    return run.run_id or run.name


def with_own_keys(runs: Iterable[RunRecord], taken: Iterable[str] = ()) -> list[RunRecord]:
    """The runs, each with a key of its own: a number tells runs without a file from earlier ones of their name.

    >>> runs = [RunRecord("data", "*: data", 2, batch_size) for batch_size in (8, 16)]
    >>> [key_of(run) for run in with_own_keys(runs)]
    ['data', 'data (2)']
    """
    known, found = set(taken), []
    for run in runs:
        key, number = key_of(run), 1
        while key in known:
            number += 1
            key = f"{run.name} ({number})"
        known.add(key)
        found.append(run if key == key_of(run) else replace(run, run_id=key))
    return found


def pareto_front(memory_bytes: Sequence[float], samples_per_s: Sequence[float]) -> list[int]:
    """Indices of the points that no other one beats in both less memory and more throughput, by memory.

    >>> pareto_front([3, 1, 2, 2], [9, 5, 4, 7])
    [1, 3, 0]
    """
    by_memory = sorted(range(len(memory_bytes)), key=lambda i: (memory_bytes[i], -samples_per_s[i]))
    front: list[int] = []
    for index in by_memory:
        if not front or samples_per_s[index] > samples_per_s[front[-1]]:
            front.append(index)
    return front


def run_rows(
    runs: Sequence[RunRecord],
    baseline: str = "",
    names: Mapping[str, str] | None = None,
    truths: Collection[str] = (),
) -> list[Row]:
    """One row per run, in the order of the runs.

    Args:
        baseline: key of the run that speed-ups are over; by default the one on one device that trained the same on the
            same machine, see ``timed_beside``. Without one, a run's own ``speedup`` stays.
        names: names by key that the user has given.
        truths: keys of the runs on one device, which are compared with nothing.
    """
    base = next((run for run in runs if key_of(run) == baseline), None)
    one_device = [run for run in runs if key_of(run) in truths and run.samples_per_s]
    rows = []
    for run in runs:
        over = base or timed_beside(run, one_device)
        key, values = key_of(run), _values(run, over)
        is_measured = run.error is None and bool(run.peak_memory_bytes)
        rows.append(
            Row(
                key,
                (names or {}).get(key, run.name),
                run.strategy,
                values,
                _texts(values, run, is_truth=key in truths),
                is_baseline=bool(baseline) and key == baseline,
                is_truth=key in truths,
                peers=(task_of(run), machine_of(run)) if is_measured and key not in truths else None,
                equal=run.equal,
                verdict=run.verdict.text,
                note="" if key in truths else _mark_and_note(run)[1],
                failure=one_line(run.error or ""),
                started=run.started,
                changes=_changes(values, _values(base, base)) if base is not None and run is not base else {},
                spread=_spread(run, over),
                seeds=tuple(run.settings.get("seeds", ())),
                steps=_steps_text(run),
            )
        )
    return with_fronts(rows)


def with_fronts(rows: Sequence[Row]) -> list[Row]:
    """The rows, ``on_front`` those that none of their ``peers`` beats in both less memory and more throughput."""
    found: set[str] = set()
    for peers in {row.peers for row in rows} - {None}:
        group = [row for row in rows if row.peers == peers]
        memory, rates = ([row.values[name] or 0.0 for row in group] for name in ("peak_bytes", "samples_per_s"))
        found |= {group[index].key for index in pareto_front(memory, rates)}
    return [replace(row, on_front=row.key in found) for row in rows]


def _steps_text(run: RunRecord) -> str:
    """The trained steps of a run that was stopped, or of one device, which trains those that are compared."""
    count = len(run.step_times_s)
    return counted(count, "step") if 0 < count < run.settings.get("steps", count) else ""


def _spread(run: RunRecord, base: RunRecord | None) -> dict[str, float]:
    """The standard deviations, that of the speed-up over ``base`` if there is one."""
    if base is None or not base.samples_per_s or "samples_per_s" not in run.spread:
        return run.spread
    return {**run.spread, "speedup": run.spread["samples_per_s"] / base.samples_per_s}


def _changes(values: Mapping[str, float | None], base: Mapping[str, float | None]) -> dict[str, str]:
    """Relative differences to the baseline, of the values that both have."""
    found = {}
    for key in ("samples_per_s", "peak_bytes", "boxed_bytes", "step_s"):
        here, there = values[key], base[key]
        if here is not None and there:
            found[key] = signed_percent(here / there - 1)
    bubble, other = values["bubble"], base["bubble"]
    if bubble is not None and other is not None and round(100 * (bubble - other)):
        found["bubble"] = signed_percent(bubble - other).replace(" %", " pt")
    return found


def _values(run: RunRecord, base: RunRecord | None) -> dict[str, float | None]:
    predicted_s, step_s = run.predicted.get("step_s"), run.step_s
    known = run.error is None
    peak = float(max(run.peak_memory_bytes)) if run.peak_memory_bytes else run.predicted.get("peak_bytes")
    return {
        "samples_per_s": run.samples_per_s if known and run.samples_per_s else None,
        "predicted_samples_per_s": run.predicted.get("samples_per_s"),
        "speedup": run.speedup_over(base) if known else None,
        "peak_bytes": peak,
        "boxed_bytes": float(run.boxed_bytes_per_step) if known else run.predicted.get("boxed_bytes"),
        "bubble": run.bubble if known else run.predicted.get("bubble"),
        "predicted_s": predicted_s,
        "step_s": step_s if known else None,
        "error": predicted_s / step_s - 1 if known and predicted_s and step_s else None,
        "rank_seconds": run.rank_seconds if known else None,
        "final_loss": run.final_loss,
        "loss_difference": run.loss_difference if known else None,
    }


def _loss_text(loss: float) -> str:
    return three_digits(loss) if abs(loss) < 1e5 else f"{loss:.3g}"


_WRITERS: dict[str, Callable[[float], str]] = {
    "samples_per_s": three_digits,
    "speedup": speedup_text,
    "peak_bytes": format_bytes,
    "boxed_bytes": format_bytes,
    "bubble": percent,
    "predicted_s": format_seconds,
    "step_s": format_seconds,
    "error": signed_percent,
    "rank_seconds": three_digits,
    "final_loss": _loss_text,
}


def _texts(values: Mapping[str, float | None], run: RunRecord, is_truth: bool) -> dict[str, str]:
    texts = {}
    for key, write in _WRITERS.items():
        value = values[key]
        texts[key] = DASH if value is None else write(value)
    return texts | {"loss_difference": "reference" if is_truth else _mark_and_note(run)[0]}


def equal_text(run: RunRecord) -> str:
    """Whether the run equals one device, with its largest loss difference: ``'\u2713 2e-7'``.

    ``'\u2713 2e-2 noise'`` if rounding has grown beyond the tolerance, ``'unchecked'`` if no check was wanted. A note
    says what the mark does not: ``'\u2713 2e-7, then nan'``.
    """
    return ", ".join(filter(None, _mark_and_note(run)))


def _mark_and_note(run: RunRecord) -> tuple[str, str]:
    note = run.verdict.note
    if run.equal is None:
        return (NOT_CHECKED if run.settings.get("check_steps") == 0 else "" if note else DASH), note
    if note and run.loss_difference == math.inf:
        return f"{CROSS} {note}", ""
    noise = " noise" if run.verdict.grown else ""
    return f"{TICK if run.equal else CROSS} {short_difference(run.loss_difference)}{noise}", note


def sorted_rows(rows: Sequence[Row], key: str = "samples_per_s", ascending: bool | None = None) -> list[Row]:
    """Sorted by a column, by default its better end first; rows without a value, or with nan, last."""
    column = next((column for column in COLUMNS if column.key == key), COLUMNS[1])
    up = column.ascending if ascending is None else ascending
    if key == "name":
        return sorted(rows, key=lambda row: row.name, reverse=not up)
    values = [row.values.get(key) for row in rows]
    is_known = [value is not None and not math.isnan(value) for value in values]
    known = [row for row, has_value in zip(rows, is_known, strict=True) if has_value]
    unknown = [row for row, has_value in zip(rows, is_known, strict=True) if not has_value]
    return sorted(known, key=lambda row: row.values[key] or 0.0, reverse=not up) + unknown


_WORDS = {
    "memory": ("peak_bytes", 1e6),
    "peak": ("peak_bytes", 1e6),
    "boxed": ("boxed_bytes", 1e6),
    "samples": ("samples_per_s", 1.0),
    "samples/s": ("samples_per_s", 1.0),
    "speedup": ("speedup", 1.0),
    "speed-up": ("speedup", 1.0),
    "bubble": ("bubble", 0.01),
    "step": ("step_s", 1.0),
    "error": ("error", 0.01),
    "cost": ("rank_seconds", 1.0),
    "loss": ("final_loss", 1.0),
}
_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
_CONDITION = re.compile(r"(.*?)\s*(<=|>=|<|>|=)\s*(.*)")


def filter_rows(rows: Sequence[Row], text: str) -> list[Row]:
    """Rows that meet all conditions of ``text``, separated by commas: ``"memory < 300"`` (MB), ``"speedup > 1.5"``,
    ``"bubble < 20"`` (percent), ``"loss < 1e-3"``; anything else must be part of name or strategy: ``"zero=2"``.

    Raises:
        ValueError: a comparison with a name that is no column, or with what is no number.
    """
    kept = list(rows)
    for part in filter(None, map(str.strip, text.lower().split(","))):
        condition = _CONDITION.fullmatch(part)
        if condition is None or (condition[2] == "=" and condition[1] not in _WORDS):
            wanted = part if condition is None else f"{condition[1]}={condition[3]}"
            kept = [row for row in kept if _has(f"{row.name} {row.detail}".lower(), wanted)]
            continue
        word, sign, number = condition.groups()
        if word not in _WORDS:
            raise ValueError(f"filter {part!r}: no column {word!r}. Columns are {', '.join(_WORDS)}.")
        try:
            limit = float(number)
        except ValueError:
            raise ValueError(f"filter {part!r}: compare one of {', '.join(_WORDS)} with a number.") from None
        key, unit = _WORDS[word]
        known = [(row, row.values.get(key)) for row in kept]
        kept = [row for row, value in known if value is not None and _SIGNS[sign](value, limit * unit)]
    return kept


def _has(text: str, wanted: str) -> bool:
    """Whether a text has ``wanted``; the number of an option is a whole one: ``mb=16`` does not have ``mb=1``."""
    return (
        re.search(re.escape(wanted) + (r"(?!\d)" if "=" in wanted and wanted[-1].isdigit() else ""), text) is not None
    )


def rows_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV: names, strategies, numbers in SI units, standard deviations where rows have several seeds."""
    keys = ["samples_per_s", *(key for key in rows[0].values if key != "samples_per_s")] if rows else []
    spreads = list(dict.fromkeys(key for row in rows for key in row.spread))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    deviations = [f"{key}_std" for key in spreads]
    writer.writerow(["name", "strategy", *keys, *deviations, "equal", "started", "failure"])
    for row in rows:
        found = [*(row.values[key] for key in keys), *(row.spread.get(key) for key in spreads)]
        numbers = ["" if number is None else repr(number) for number in found]
        equal = "" if row.equal is None else row.equal
        writer.writerow([row.name, row.detail, *numbers, equal, row.started, row.failure])
    return out.getvalue()


def common_settings(runs: Sequence[RunRecord]) -> str:
    """Models, batch sizes, ranks and days of some runs, on one line."""
    models = {str(run.settings["model"]) for run in runs if "model" in run.settings}
    batches, ranks = {run.batch_size for run in runs}, {run.num_ranks for run in runs}
    days = sorted({run.started[:10] for run in runs if run.started})
    parts = [", ".join(sorted(models)), f"batch {', '.join(map(str, sorted(batches)))}", "median after warm-up"]
    parts.append(f"{', '.join(map(str, sorted(ranks)))} ranks")
    if len(days) > 1:
        parts.append(f"{days[0]} to {days[-1]}")
    return " \u00b7 ".join(part for part in parts if part)


def prediction_errors(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Median and largest error of the predicted step times, as shares; None without predictions."""
    errors = [abs(error) for row in rows if (error := row.values.get("error")) is not None]
    return (median(errors), max(errors)) if errors else None


def one_line(text: str, width: int = 110) -> str:
    """The first line that is not empty, cut to ``width`` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= width else line[: width - 1] + "\u2026"
