"""Planner and cost model against published runs, and the search's times.

    python -m benchmarks.planner
    python -m benchmarks.planner --rows            # every published run, beside the summary

Predictions use the one function for tables, ``workbench.cost.table``. Sets of runs:

    calibration   the rows that machine files were fitted on
    megatron      other rows of arXiv 2104.04473 (A100-80GB, 64 to 3072 GPUs)
    zero3         its rows of ZeRO 3 without model parallelism
    follow-up     arXiv 2205.05198, full and selective recomputation
    h100          DGX H100 in 8 bits, NeMo 24.09; one of its rows was fitted on
    v100          Megatron-LM of 2020 on a DGX-2H; one row of it was fitted on
    mpt-a100      FSDP of another trainer (llm-foundry) on 8 to 64 GPUs; one constant of all machines, what
                  hidden exchanges take of memory, was chosen by these and the next
    mpt-h100      the same on 8 to 512 GPUs
    titan         a third trainer (torchtitan) on 8 to 512 GPUs with memory, on H100s of another kind (HBM2e, 500 W)
    titan-context  torchtitan with its context parallelism, sequences of up to 262 thousand words on 8 and 512 GPUs
    titan-a100    torchtitan on 64 A100
    llama3        Llama 3 on 8 to 16384 H100: Megatron-Bridge in 8 bits, and the report of Llama 3
    vocabulary    pipelines of Megatron-LM with 32 to 256 thousand words, with memory (arXiv 2411.05288)
    megatron-core  Megatron-Core 0.8 on 48 to 6144 H100, 48 data ranks; its micro-batches are not published
    megatron-tests  two of Megatron-LM's own tests, with memory, on A100 and H100; their kernels are deterministic
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.planner_search import Section, searched
from benchmarks.published_runs import Judged, effects, in_order, judge, median_and_worst, memory_errors
from benchmarks.reporting import Comparison, Target, publish, table

BOUNDS = {
    "megatron": (4, 8),
    "follow-up": (5, 10),
    "h100": (8, 15),
    "megatron-core": (8, 12),
    "titan-context": (10, 25),
}
"""Median and worst error that a set may have, in percent."""
MEMORY_BOUNDS = 6, 10
ORDER = Target(0.9, at_least=True)
JUDGED_ORDER = ("megatron", "zero3", "follow-up")


def summary(judged: dict[str, list[Judged]]) -> str:
    """A row per set: how many runs, median and worst error, pairs in the right order."""
    rows = []
    for name, runs in judged.items():
        middle, worst = median_and_worst(runs)
        right, pairs = in_order(runs)
        order = f"{right} of {pairs}" if pairs else ""
        rows.append([name, str(len(runs)), f"{middle:.1%}", f"{worst:.1%}", order])
    return table(["set", "runs", "median", "worst", "pairs in order"], rows)


def effect_rows(judged: dict[str, list[Judged]]) -> str:
    """What selective instead of full recomputation is worth, in throughput."""
    found = effects(judged["follow-up"], "full", "selective")
    rows = [
        [name, f"{measured:.1%}", f"{predicted:.1%}", f"{100 * (predicted - measured):+.1f}"]
        for name, (measured, predicted) in found.items()
    ]
    return table(["full to selective", "measured", "predicted", "points"], rows)


def memory_rows(judged: dict[str, list[Judged]]) -> str:
    """Runs whose memory was published; judged are those that report what tensors had, as is predicted."""
    rows = [
        [run.name, run.row["gpus"], run.row["memory_is"], run.row["measured_gib"],
         f"{run.estimate.peak_bytes / 2**30:.1f}", f"{run.memory_error:+.1%}"]
        for runs in judged.values() for run in runs if run.row["measured_gib"]
    ]  # fmt: skip
    return table(["run", "GPUs", "memory", "measured GiB", "predicted GiB", "error"], rows)


def run_rows(judged: dict[str, list[Judged]]) -> str:
    """Every run."""
    rows = [
        [
            name, run.name, run.row["gpus"], f"{run.measured_s:.2f}", f"{run.estimate.step_s:.2f}",
            f"{run.error:+.1%}", f"{run.estimate.peak_bytes / 2**30:.1f}", run.row["source"],
        ]
        for name, runs in judged.items() for run in runs
    ]  # fmt: skip
    return table(["set", "run", "GPUs", "measured s", "predicted s", "error", "GiB", "source"], rows)


def comparisons(judged: dict[str, list[Judged]]) -> Iterator[Comparison]:
    """Errors of the sets that have bounds, and the order of strategies."""
    for name, bounds in BOUNDS.items():
        for what, error, bound in zip(("median", "worst"), median_and_worst(judged[name]), bounds, strict=True):
            yield Comparison(f"{what} error of {name}, {len(judged[name])} runs", 100 * error, Target(bound, unit="%"))
    errors = sorted(abs(error) for error in memory_errors(judged).values())
    for what, error, bound in zip(("median", "worst"), (median(errors), errors[-1]), MEMORY_BOUNDS, strict=True):
        name = f"{what} error of allocated memory, {len(errors)} runs"
        yield Comparison(name, 100 * error, Target(bound, unit="%"))
    right, pairs = in_order([run for name in JUDGED_ORDER for run in judged[name]])
    yield Comparison(f"order of strategies: {right} of {pairs} pairs more than 5% apart", right / pairs, ORDER)


def published(with_rows: bool) -> Section:
    """Predictions against published runs."""
    judged = judge()
    parts = [summary(judged), effect_rows(judged), memory_rows(judged)]
    return "\n\n".join([*parts, run_rows(judged)] if with_rows else parts), list(comparisons(judged))


SECTIONS = {"Search": searched, "Published runs": published}
"""What is reported, in order: functions of whether rows are wanted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and keep all sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="every published run, beside the summary")
    args = parser.parse_args(arguments)
    found = {title: section(args.rows) for title, section in SECTIONS.items()}
    body = "\n\n".join(f"## {title}\n\n{text}" for title, (text, _) in found.items())
    publish("planner", "Planner and cost model", body, [row for _, rows in found.values() for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
