"""What ``offload=`` takes off a rank's memory on CPUs, and what it costs in time.

    python -m benchmarks.offload

A GPT of 8 blocks with AdamW on 2 processes: a wide one for the optimizer's state, and one on more words for
activations, data parallel and in two stages. Each strategy has processes of its own, because the peak is that of the
process: above where it stood before the model was made. Files are in the temporary folder.
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
NUM_BLOCKS = 8
WIDE, LONG = (768, 4096, 128, 8), (256, 1024, 256, 16)
"""Width, number of words, length and number of texts."""
PAIRS = (
    (WIDE, "*: data", "*: data | offload=optimizer"),
    (WIDE, "*: data | zero=1", "*: data | zero=1 offload=optimizer"),
    (LONG, "*: data", "*: data | offload=activations"),
    (LONG, "pipeline | mb=4 gpipe", "pipeline | mb=4 gpipe offload=activations"),
)
SAVED = Target(0.7, at_least=True)
"""Of the bytes that are offloaded: the rest of the peak has its fullest moment elsewhere in the step."""
_STRATEGIES = "BENCHMARK_STRATEGIES"


class Training:
    """A model with its optimizer; call it for one step on the same batch."""

    def __init__(self, size: Sequence[int], strategy: str) -> None:
        torch.manual_seed(0)
        width, num_words, length, batch = size
        self.words = torch.randint(num_words, (batch, length))
        self.model = wb.parallelize(GPT(width, NUM_BLOCKS, num_words, length), strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def __call__(self) -> float:
        """The loss."""
        self.optimizer.zero_grad()
        loss = wb.forward_backward(self.model, next_word_loss, self.words, self.words)
        self.optimizer.step()
        return float(loss.item())


def held_by(size: Sequence[int], strategy: str) -> dict[str, Any]:
    """Losses of some steps, the bytes of the fullest moment of the later ones, and those of each kind that is held."""
    meter = PeakMeter(current().device)
    training = Training(size, strategy)
    losses = [training() for _ in range(WARM_STEPS)]
    meter.start_again()
    losses += [training() for _ in range(NUM_STEPS - WARM_STEPS)]
    peak = meter.peak_bytes()
    with wb.debug.memory_report(training.model, training.optimizer) as report:
        losses.append(training())
    held = report[0]
    found = {"losses": losses, "peak": peak, "offloaded": held.get("offloaded", 0)}
    return found | {kind: held[kind] for kind in ("optimizer", "activations")}


def work() -> None:
    """What each of the processes runs: the peak of one strategy, or the times of several; the first one hands in."""
    wb.init()
    size, first, *others = json.loads(os.environ[_STRATEGIES])
    if others:
        trainings = {name: Training(size, name) for name in (first, *others)}
        found: dict[str, Any] = medians(interleave(trainings, ROUNDS, 1, together))
    else:
        found = held_by(size, first)
    if wb.rank() == 0:
        hand_in(found)
    wb.barrier()


def _launched(size: Sequence[int], *strategies: str) -> dict[str, Any]:
    os.environ[_STRATEGIES] = json.dumps([size, *strategies])
    (found,) = launch_often("benchmarks.offload", NUM_PROCESSES, [], 1)
    return dict(found)


def _words(size: Sequence[int]) -> str:
    width, num_words, length, batch = size
    number = sum(p.numel() for p in GPT(width, NUM_BLOCKS, num_words, length).parameters())
    return f"width {width}, {number / 1e6:.0f} million parameters, {batch} sequences of {length} tokens"


def main() -> int:
    """Launch each strategy, and publish."""
    rows, judged = [], []
    for size, plain, offloaded in PAIRS:
        peaks, times_s = {name: _launched(size, name) for name in (plain, offloaded)}, _launched(size, plain, offloaded)
        if peaks[plain]["losses"] != peaks[offloaded]["losses"]:
            raise RuntimeError(f"benchmarks.offload: {offloaded} has other losses than {plain}.")
        for name, one in peaks.items():
            sizes = (format_bytes(one[kind]) for kind in ("peak", "optimizer", "activations", "offloaded"))
            rows.append([f"`{name}`", _words(size), *sizes, format_seconds(times_s[name])])
        saved, beside = peaks[plain]["peak"] - peaks[offloaded]["peak"], peaks[offloaded]["offloaded"]
        words = format_bytes(saved), f"offloaded {format_bytes(beside)}"
        judged.append(Comparison(f"bytes saved by {offloaded}, {_words(size)}", saved / beside, SAVED, *words))
    body = (
        f"A GPT of {NUM_BLOCKS} blocks, AdamW, {NUM_PROCESSES} processes, rank 0. Losses of {NUM_STEPS} steps are the "
        "same with and without. Steps of a pair in turns.\n\n"
    )
    body += table(["", "", "peak of the process", "state", "activations", "offloaded", "step"], rows, 2)
    return 0 if publish("offload", "What is offloaded on CPUs", body, judged) else 1


if __name__ == "__main__":
    if is_launched():
        work()
    else:
        sys.exit(main())
