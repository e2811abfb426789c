"""All comparisons, and one table of them: ``results/<date>-<machine>.md``.

    python -m benchmarks                        run every benchmark, then make the table (over an hour)
    python -m benchmarks --only live session    run these, then make the table
    python -m benchmarks --table                make it from the newest result files, without running anything

The README quotes the table: ``python -m tools.quote_numbers``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks import one_table
from benchmarks.reporting import RESULTS, machine

BENCHMARKS = (
    "overhead", "boxing", "data_parallel", "tensor_parallel", "overlap", "context_parallel", "experts", "pipeline",
    "optimizer", "capture", "compiled", "memory", "offload", "saving", "session", "live", "panel", "choose_parallelism",
    "planner", "planner_truth", "equality",
)  # fmt: skip


def run(names: list[str]) -> list[str]:
    """Run the benchmarks one after the other, whatever the first one says; the names of those that failed."""
    failed = []
    for name in names:
        print(f"==> benchmarks.{name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    return failed


def write_table() -> str:
    """Make the table of this machine's newest results and keep it; returns the text."""
    results = one_table.newest(RESULTS, machine().partition(";")[0])
    if not results:
        raise SystemExit("benchmarks: no results of this machine yet; python -m benchmarks measures them")
    has_gpu = any(each.name.startswith("gpu-") for each in results)
    without = "" if has_gpu else "\n\nNot measured, for want of a GPU: `python -m benchmarks.gpu`."
    summary = (
        "Ours and theirs take turns in one run; *theirs* names them, and a row without it is held against a figure of "
        "our own choice. The files beside this one say how each was measured."
    )
    text = (
        f"# {one_table.TITLE}\n\n{one_table.score(results)}\n\n{summary}{without}\n\n{one_table.one_table(results)}\n"
    )
    latest = max(results, key=lambda result: result.date)
    (RESULTS / one_table.file_name(latest)).write_text(text, encoding="utf-8")
    return text


def main() -> int:
    """Run what is asked for and print the table; the exit code is 1 if a benchmark broke off."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    failed = [] if args.table else run(args.only)
    print(write_table())
    if failed:
        print(f"benchmarks: broken off: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
