"""The sweep over torch's op_db: ``python -m tests.op_db.sweep [--only name] [--samples n] [--seed s] [--table]``."""

from __future__ import annotations

import argparse
import collections
import fnmatch
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.op_db import table
from tests.op_db.compare import Outcome, run_sample
from tests.op_db.samples import EXEMPT, Entry, entries, samples

TABLE = Path(__file__).parents[2] / "docs" / "functions.md"


@dataclass
class Result:
    """What became of one entry's samples."""

    name: str
    kind: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.state != "ok"]

    @property
    def sharded(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.is_sharded]

    @property
    def by(self) -> str:
        """ "rule" where most of the calls on split or partial operands ran without a fallback."""
        if self.name in EXEMPT:
            return "exempt"
        if not self.sharded:
            return "no tensors"
        fell = sum(bool(outcome.fallbacks) for outcome in self.sharded)
        return "fallback" if 2 * fell > len(self.sharded) else "rule"


def run_entry(entry: Entry, count: int, seed: int) -> Result:
    """All chosen samples of one entry."""
    result = Result(entry.name)
    if entry.name in EXEMPT:
        return result
    started = time.perf_counter()
    try:
        chosen = samples(entry, count, seed)
    except Exception as error:  # noqa: BLE001 - an entry that cannot make samples here (no kernel for a CPU)
        result.outcomes.append(Outcome("raises", f"no samples: {type(error).__name__}: {error}"[:200]))
        return result
    for position, sample in enumerate(chosen):
        result.outcomes.append(run_sample(entry, sample, seed * 1000 + position))
    result.seconds = time.perf_counter() - started
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="name or pattern of entries")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=("function", "method", "in_place", "keywords"), default="function")
    parser.add_argument("--slowest", action="store_true", help="print the entries that take longest")
    parser.add_argument("--table", action="store_true", help="write docs/functions.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for entry in entries(options.form):
        if fnmatch.fnmatch(entry.name, options.only):
            results.append(run_entry(entry, options.samples, options.seed))
            report(results[-1])
    counts = collections.Counter("fails" if r.failures else "ok" for r in results)
    kinds = collections.Counter(r.by for r in results)
    sys.stdout.write(f"{dict(counts)}  {dict(kinds)}\n")
    if options.table:
        TABLE.write_text(table.write(results))
    if options.slowest:
        for result in sorted(results, key=lambda r: -r.seconds)[:15]:
            sys.stdout.write(f"{result.seconds:6.2f} s  {result.name}\n")
    return 1 if counts["fails"] else 0


def report(result: Result) -> None:
    """One line per failing entry, with its first failure."""
    if result.failures:
        first = result.failures[0]
        message = f"{' '.join(first.message.split())[:260]}  <{first.where[:110]}>"
        count = f"{len(result.failures)}/{len(result.outcomes)}"
        sys.stdout.write(f"{result.name:38} {first.state:7} {count}  {message}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
