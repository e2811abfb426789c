"""What one GPU shows of the workbench, in under 20 minutes: right numbers first, then speed.

    python -m benchmarks.gpu                       on the first GPU; writes results/<date>-gpu-<its name>.md
    python -m benchmarks.gpu --device cpu          the same parts at small size, without a GPU; writes nothing
    python -m benchmarks.gpu --only bandwidth      some of the parts

Each part runs in a process of its own with a time limit. A part that fails leaves what it has found until then, and
its last lines of error in the table; the next one begins all the same. All that a part prints is in ``out/gpu``.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path

import torch

from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.place import Place
from benchmarks.gpu.runner import Outcome, describe, run
from benchmarks.reporting import Comparison, processor_words, publish

_TIMES_AS_LONG = 4
"""Without a GPU no time is promised."""


def work(part: Part, place: Place, into: Path) -> None:
    """One part, in this process; each thing that it finds is written at once."""
    if place.is_gpu:
        torch.cuda.set_device(place.device)
    with into.open("wb", buffering=0) as file:
        for found in part.program(place):
            file.write(pickle.dumps(found))


def outcome_of(part: Part, place: Place) -> Outcome:
    """One part, in a process of its own."""
    if part.needs_gpu and not place.is_gpu:
        return Outcome(part.name, [], "", 0.0, needs_gpu=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", place.device, "--part", part.name, "--into"]
    return run(part.name, command, part.limit_s if place.is_gpu else _TIMES_AS_LONG * part.limit_s)


def main() -> int:
    """Run the parts and print their table; the exit code is 1 if one failed or missed its target."""
    by_name = {part.name: part for part in PARTS}
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", nargs="+", choices=by_name, default=list(by_name), metavar="PART")
    parser.add_argument("--part", choices=by_name, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    place = Place(args.device)
    if args.part is not None:
        work(by_name[args.part], place, args.into)
        return 0
    outcomes = []
    for name in args.only:
        print(f"==> {name}", flush=True)
        outcomes.append(outcome_of(by_name[name], place))
        print(describe(outcomes[-1:]), flush=True)
    judged = [found for outcome in outcomes for found in outcome.found if isinstance(found, Comparison)]
    if place.is_gpu:
        publish(f"gpu-{processor_words(place.name)}", f"On one GPU: {place.name}", describe(outcomes), judged)
    else:
        print(f"{describe(outcomes)}\n\nAt small size, without a GPU: the numbers say nothing.")
    failed = any(outcome.error for outcome in outcomes)
    return int(failed or (place.is_gpu and not all(found.is_met for found in judged)))


if __name__ == "__main__":
    sys.exit(main())
