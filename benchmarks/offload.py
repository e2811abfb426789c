"""What ``offload=`` takes off a rank's memory on CPUs, and what it costs in time.

    python -m benchmarks.offload

A GPT of 8 blocks with AdamW on 2 processes, data parallel. Each strategy has processes of its own, because the peak is
that of the process: above where it stood before the model was made. Files are in the temporary folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from benchmarks.harness import hand_in, interleave, is_launched, launch_often, medians, together
from benchmarks.reporting import Comparison, Target, publish, table
from workbench.tensors.world import current
from workbench.training.diagnostics.memory import PeakMeter
from workbench.units import format_bytes, format_seconds

NUM_PROCESSES, NUM_STEPS, WARM_STEPS, ROUNDS = 2, 6, 3, 8
WIDTH, NUM_BLOCKS, NUM_WORDS, LENGTH, BATCH = 768, 8, 4096, 128, 8
PAIRS = (("*: data", "*: data | offload=optimizer"), ("*: data | zero=1", "*: data | zero=1 offload=optimizer"))
SAVED = Target(0.7, at_least=True)
_STRATEGIES = "BENCHMARK_STRATEGIES"


class Training:
    """A model with its optimizer; call it for one step on the same batch."""

    def __init__(self, strategy: str) -> None:
        torch.manual_seed(0)
        self.words = torch.randint(NUM_WORDS, (BATCH, LENGTH))
        self.model = wb.parallelize(GPT(WIDTH, NUM_BLOCKS, NUM_WORDS, LENGTH), strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def __call__(self) -> float:
        """The loss."""
        self.optimizer.zero_grad()
        loss = wb.forward_backward(self.model, next_word_loss, self.words, self.words)
        self.optimizer.step()
        return float(loss.item())


def work() -> None:
    """What each of the processes runs: the peak of one strategy, or the times of several; the first one hands in."""
    wb.init()
    meter, (first, *others) = PeakMeter(current().device), json.loads(os.environ[_STRATEGIES])
    training = Training(first)
    if others:
        trainings = {first: training, **{name: Training(name) for name in others}}
        found: dict[str, Any] = medians(interleave(trainings, ROUNDS, 1, together))
    else:
        losses = [training() for _ in range(WARM_STEPS)]
        meter.start_again()
        losses += [training() for _ in range(NUM_STEPS - WARM_STEPS)]
        report = wb.debug.memory_report(training.model, training.optimizer)[0]
        offloaded = report.get("offloaded", 0)
        found = {"losses": losses, "state": report["optimizer"] + offloaded, "offloaded": offloaded}
        found["peak"] = meter.peak_bytes()
    if wb.rank() == 0:
        hand_in(found)
    wb.barrier()


def _launched(strategies: Sequence[str]) -> dict[str, Any]:
    os.environ[_STRATEGIES] = json.dumps(strategies)
    (found,) = launch_often("benchmarks.offload", NUM_PROCESSES, [], 1)
    return dict(found)


def main() -> int:
    """Launch each strategy, and publish."""
    rows, judged = [], []
    for plain, offloaded in PAIRS:
        peaks, times_s = {name: _launched([name]) for name in (plain, offloaded)}, _launched([plain, offloaded])
        if peaks[plain]["losses"] != peaks[offloaded]["losses"]:
            raise RuntimeError(f"benchmarks.offload: {offloaded} has other losses than {plain}.")
        for name, one in peaks.items():
            sizes = (format_bytes(one[kind]) for kind in ("peak", "state", "offloaded"))
            rows.append([f"`{name}`", *sizes, format_seconds(times_s[name])])
        saved, state = peaks[plain]["peak"] - peaks[offloaded]["peak"], peaks[plain]["state"]
        words = format_bytes(saved), f"state {format_bytes(state)}"
        judged.append(Comparison(f"bytes saved by {offloaded}", saved / state, SAVED, *words))
    parameters = sum(p.numel() for p in GPT(WIDTH, NUM_BLOCKS, NUM_WORDS, LENGTH).parameters())
    body = (
        f"GPT, width {WIDTH}, {NUM_BLOCKS} blocks, {parameters:,} parameters, AdamW, {BATCH} texts of {LENGTH} words, "
        f"{NUM_PROCESSES} processes, rank 0. Losses of {NUM_STEPS} steps are the same with and without. Steps of a "
        f"pair in turns.\n\n"
    )
    body += table(["", "peak of the process", "state", "offloaded", "step"], rows)
    return 0 if publish("offload", "What is offloaded on CPUs", body, judged) else 1


if __name__ == "__main__":
    if is_launched():
        work()
    else:
        sys.exit(main())
