"""Published training runs of transformers, and how far predictions are from them.

``published_runs.csv`` has a row per run, in the columns of ``workbench simulate``, with what was measured (seconds per
step, or TFLOP/s per GPU as the papers count them) and where that is from. ``checked`` says what its figures were
compared with; rows without it were written down from memory of the papers. Rows of the set "calibration" were used for
the machines' files; all others are held back. ``memory_is`` says of published memory whether it is what tensors had at
the peak ("allocated"), which is what is predicted, or what the allocator had asked the device for ("reserved").
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from workbench.cost.estimate import Estimate
from workbench.cost.hardware import Hardware
from workbench.cost.table import predict_row

FILE = Path(__file__).parent / "published_runs.csv"
DIFFERENT = 0.05
"""Runs whose throughputs differ by less are not put into an order."""


@dataclass(frozen=True)
class Judged:
    """A run and its prediction; seconds of one step."""

    row: Mapping[str, str]
    measured_s: float
    estimate: Estimate

    @property
    def name(self) -> str:
        return self.row["name"]

    @property
    def error(self) -> float:
        """Relative: 0.1 is a step predicted 10% too long."""
        return self.estimate.step_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Relative: -0.1 is a peak predicted 10% too small. For runs whose memory was published."""
        return self.estimate.peak_bytes / 2**30 / float(self.row["measured_gib"]) - 1

    @property
    def model(self) -> tuple[str, ...]:
        """What runs have in common that are compared with one another."""
        return tuple(self.row[c] for c in ("machine", "heads", "hidden", "layers", "seq", "vocab", "dtype"))

    def rate(self, seconds: float) -> float:
        """Samples per second and GPU."""
        return int(self.row["batch"]) / int(self.row["gpus"]) / seconds


def read_rows() -> list[dict[str, str]]:
    """All runs."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured_s(row: Mapping[str, str]) -> float:
    """Seconds per step; of TFLOP/s by the formula of arXiv 2104.04473, which counts recomputation."""
    if row["measured_s"]:
        return float(row["measured_s"])
    h, n, s, b, v, gpus = (int(row[c]) for c in ("hidden", "layers", "seq", "batch", "vocab", "gpus"))
    operations = 96 * b * s * n * h * h * (1 + s / (6 * h) + v / (16 * n * h))
    return operations / gpus / (float(row["measured_tflops"]) * 1e12)


def judge(sets: Iterable[str] | None = None) -> dict[str, list[Judged]]:
    """Runs with their predictions, by set; of all sets, or of some."""
    wanted = None if sets is None else set(sets)
    machines: dict[str, Hardware] = {}
    judged: dict[str, list[Judged]] = {}
    for number, row in enumerate(read_rows(), start=1):
        if wanted is None or row["set"] in wanted:
            found = Judged(row, measured_s(row), predict_row(row, number, machines))
            judged.setdefault(row["set"], []).append(found)
    return judged


def median_and_worst(runs: Sequence[Judged]) -> tuple[float, float]:
    """Of the absolute relative errors."""
    errors = [abs(run.error) for run in runs]
    return median(errors), max(errors)


def memory_errors(judged: Mapping[str, Sequence[Judged]]) -> dict[str, float]:
    """Relative, by name, of runs whose allocated memory was published: -0.1 is 10% too little predicted."""
    runs = [run for runs in judged.values() for run in runs if run.row["memory_is"] == "allocated"]
    return {run.name: run.memory_error for run in runs}


def in_order(runs: Sequence[Judged]) -> tuple[int, int]:
    """(pairs whose order is predicted, pairs) of runs of one model whose throughputs per GPU differ."""
    right = count = 0
    for one, two in combinations(runs, 2):
        if one.model != two.model:
            continue
        really = one.rate(one.measured_s) / two.rate(two.measured_s)
        if abs(really - 1) <= DIFFERENT or abs(1 / really - 1) <= DIFFERENT:
            continue
        predicted = one.rate(one.estimate.step_s) / two.rate(two.estimate.step_s)
        count += 1
        right += (really > 1) == (predicted > 1)
    return right, count


def effects(runs: Sequence[Judged], one: str, two: str) -> dict[str, tuple[float, float]]:
    """By model: how much faster runs named ``<model>-<two>`` are than ``<model>-<one>``, (measured, predicted)."""
    named = {run.name: run for run in runs}
    found = {}
    for name, run in named.items():
        other = named.get(name.removesuffix(one) + two) if name.endswith(one) else None
        if other is not None:
            speedups = run.measured_s / other.measured_s - 1, run.estimate.step_s / other.estimate.step_s - 1
            found[name.removesuffix(f"-{one}")] = speedups
    return found
