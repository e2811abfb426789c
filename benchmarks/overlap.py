"""What ``overlap=`` does to a training step with split weights, over shared memory and over gloo, on 2 processes.

    python -m benchmarks.overlap

Blocks of ``benchmarks.tensor_parallel`` under ``*: model``, whole and in 2 and 4 pieces, take turns in the same
processes. In shared memory the ranks add up by themselves, and the option changes nothing. gloo exchanges on threads
of its own, which need cores of their own: with no more cores than processes, pieces can only cost.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import workbench as wb
from benchmarks.harness import hand_in, interleave, is_launched, launch_often, medians, together
from benchmarks.reporting import Target, publish, side_by_side, table
from benchmarks.tensor_parallel import Size, Training

NUM_PROCESSES, ROUNDS, CALLS = 2, 12, 2
TRANSPORTS = ("shared", "gloo")
PIECES = (1, 2, 4)
TARGET = Target(0.9, at_least=True)
"""Of the steps without: what pieces may cost at most where nothing can overlap."""
SIZES = (Size(8, 256, 32, 8, 64, TARGET), Size(4, 512, 64, 8, 128, TARGET))
_LARGEST_DIFFERENCE = 1e-3


def largest_difference(trainings: dict[str, Training]) -> float:
    """Between the weights of the models, which have made as many steps on the same batch."""
    first, *others = [[_whole(p) for p in each.model.parameters()] for each in trainings.values()]
    return max(float((a - b).abs().max()) for other in others for a, b in zip(first, other, strict=True))


def _whole(parameter: Any) -> torch.Tensor:
    found: torch.Tensor = parameter.full_tensor().detach()
    return found


def work() -> None:
    """What each of the processes runs; the first one hands in the seconds of a step by size and pieces."""
    wb.init()
    found = {}
    for size in SIZES:
        trainings = {
            str(pieces): Training(wb.parallelize(size.model(), f"*: model | overlap={pieces}"), size)
            for pieces in PIECES
        }
        found[str(size)] = medians(interleave(trainings, ROUNDS, CALLS, around=together))
        difference = largest_difference(trainings)
        if not difference <= _LARGEST_DIFFERENCE:
            raise AssertionError(f"{size}: weights differ by {difference:.1e}")
    if wb.rank() == 0:
        hand_in(found)
    torch.distributed.barrier()


def main() -> int:
    """Measure over each transport, and publish."""
    rows, judged = [], []
    for transport in TRANSPORTS:
        os.environ["WORKBENCH_TRANSPORT"] = transport
        (found,) = launch_often("benchmarks.overlap", NUM_PROCESSES, [], 1)
        for size, times_s in found.items():
            rows.append([f"{transport}: {size}", *(f"{times_s[str(pieces)] * 1e3:.1f}" for pieces in PIECES)])
            judged += [
                side_by_side(
                    f"{transport}, {pieces} pieces: {size}", times_s[str(pieces)], "whole", times_s["1"], TARGET
                )
                for pieces in PIECES[1:]
            ]
    body = (
        f"AdamW, {NUM_PROCESSES} processes, one thread each; medians of {ROUNDS} rounds of {CALLS} steps. Afterwards "
        f"the weights agree within {_LARGEST_DIFFERENCE:.0e}.\n\n"
    )
    body += table(["step, ms", *(f"overlap={pieces}" for pieces in PIECES)], rows)
    return 0 if publish(f"overlap-{NUM_PROCESSES}", f"Sums in pieces, {NUM_PROCESSES} processes", body, judged) else 1


if __name__ == "__main__":
    if is_launched():
        work()
    else:
        sys.exit(main())
