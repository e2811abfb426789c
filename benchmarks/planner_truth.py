"""Predictions against runs on this machine: calibrate, predict, then train, and say how far apart the two are.

    python -m benchmarks.planner_truth
    python -m benchmarks.planner_truth --engines 2 --rounds 1 --models perceptron      # a short look

Two models under twelve strategies each, on 2 and on 4 engines, in short rounds: the engines are calibrated
(`wb.planner.calibrate`), then every strategy takes a few steps, in the next round in the opposite order. A virtual
machine may
be a fifth faster or slower for some seconds, or some minutes later: of the rounds' predictions and of their steps'
medians the median counts, and how far apart rounds are stands beside it. No run of the comparison goes into a
calibration.
Predicted and measured stand side by side: the time of a step; the most bytes that the fullest rank's tensors have at
one moment of a step, as the allocator tells it in a run of its own (``benchmarks.allocated``); the bytes sent. Beside
them the peak of that rank's process above where it stood before the model was made, which nobody predicts: sums of
gradients in memory that ranks share, what the allocator keeps, and what runs before it in the same process have left
there.
The machine must be quiet; on a virtual one that is not ours alone to say, so what its hypervisor gave to other
machines meanwhile is noted. Beside the times stand the steps by the own clock of their busiest rank, which stands still
while others have its core: times threads per core, that is a step in which nobody waits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.allocated import peak_allocated
from benchmarks.gpt import GPT, next_word_loss
from benchmarks.reporting import Comparison, Target, publish, table
from workbench.core.model_costs import ModelCosts
from workbench.core.strategy import Strategy
from workbench.cost.estimate import Estimate, estimate
from workbench.cost.hardware import Hardware
from workbench.session import Session
from workbench.session.calibration import calibrate
from workbench.training.batches import Batch
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.runs.job import WARM_UP_STEPS, Job
from workbench.training.runs.train import run_strategy, warm_up
from workbench.units import format_bytes

TIME_TARGET, MEMORY_TARGET, PLACE_TARGET = Target(15, unit="%"), Target(10, unit="%"), Target(2)
"""At most: the median error of the time, the worst of the memory, and the place of the best measured strategy among the
predictions."""
_DIFFERENT, _ALIKE = 0.05, 0.02
"""Strategies whose times differ by less are not put into an order; those that are slower than the best by less than the
second are the best as well: the medians of two rounds are further apart.
"""
NUM_ROUNDS, _COUNTED_STEPS = 5, 5
_FIRST = WARM_UP_STEPS + 1
"""The step that counts first: in the one before, a run looks at its memory."""
LENGTH, NUM_WORDS = 64, 2048

PERCEPTRON = {
    2: (
        "*: data", "*: data | 1x2x1 mb=2", "*: data | 1x2x1 zero=1", "*: data | 1x2x1 zero=2", "*: data | 1x2x1 zero=3",
        "*: model", "*: model | 1x1x2 mb=2", "*: data; 2: model; 4: model | 1x1x2", "*: model:column | 1x1x2",
        "*: data; [4-8]: data@1 | 2x1x1 mb=4 gpipe", "*: data; [4-8]: data@1 | 2x1x1 mb=4 1f1b",
        "*: data; [4-8]: data@1 | 2x1x1 mb=8 1f1b",
    ),
    4: (
        "*: data", "*: data | 1x4x1 mb=2", "*: data | 1x4x1 zero=1", "*: data | 1x4x1 zero=2", "*: model",
        "*: model | 1x2x2", "*: model | 1x2x2 zero=1", "*: data; 2: model; 4: model | 1x1x4",
        "*: data; [4-8]: data@1 | 2x2x1 mb=4 1f1b", "*: model; [4-8]: model@1 | 2x1x2 mb=4 1f1b",
        "0: data@0; 2: data@1; 4: data@2; [6-8]: data@3 | 4x1x1 mb=4 1f1b",
        "0: data@0; 2: data@1; 4: data@2; [6-8]: data@3 | 4x1x1 mb=8 1f1b",
    ),
}  # fmt: skip
HALVES = "*: {0}; blocks.[2-3]: {0}@1"
QUARTERS = "*: data; blocks.1: data@1; blocks.2: data@2; blocks.3: data@3"
TEXTS = {
    2: (
        "*: data", "*: data | 1x2x1 mb=2", "*: data | 1x2x1 zero=1", "*: data | 1x2x1 zero=2", "*: data | 1x2x1 zero=3",
        "*: data | 1x2x1 recompute", "*: model", "*: model | 1x1x2 mb=2", "blocks.*.fc*: model | 1x1x2",
        f"{HALVES.format('data')} | 2x1x1 mb=4 gpipe", f"{HALVES.format('data')} | 2x1x1 mb=4 1f1b",
        f"{HALVES.format('data')} | 2x1x1 mb=8 1f1b",
    ),
    4: (
        "*: data", "*: data | 1x4x1 mb=2", "*: data | 1x4x1 zero=1", "*: data | 1x4x1 recompute", "*: model",
        "*: model | 1x2x2", "*: model | 1x2x2 zero=1", "blocks.*.fc*: model | 1x2x2",
        f"{HALVES.format('data')} | 2x2x1 mb=4 1f1b", f"{HALVES.format('model')} | 2x1x2 mb=4 1f1b",
        f"{QUARTERS} | 4x1x1 mb=4 1f1b", f"{QUARTERS} | 4x1x1 mb=8 1f1b",
    ),
}  # fmt: skip


def make_perceptron() -> nn.Sequential:
    """Pixels to classes, over four wide layers."""
    layers: list[nn.Module] = []
    for width in (784, 1536, 1536, 1536):
        layers += [nn.Linear(width, 1536), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1536, 10))


def make_gpt() -> GPT:
    """Four blocks, 256 wide."""
    return GPT(256, 4, NUM_WORDS, LENGTH)


class ClockedJob(Job):
    """Notes this thread's own clock at the beginning of every step."""

    def batches(self) -> Iterator[Batch]:
        for batch in super().batches():
            self.__dict__.setdefault("own_s", []).append(time.thread_time())
            yield batch


@dataclass(frozen=True)
class Subject:
    """A model that is trained, and how.

    Attributes:
        strategies: texts by number of engines.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    batch_size: int
    strategies: Mapping[int, tuple[str, ...]]

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two batches of random samples."""
        generator = torch.Generator().manual_seed(0)
        if self.name == "perceptron":
            pixels = torch.randn(2 * self.batch_size, 784, generator=generator)
            return pixels, torch.randint(10, (2 * self.batch_size,), generator=generator)
        words = torch.randint(NUM_WORDS, (2 * self.batch_size, LENGTH + 1), generator=generator)
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()

    def job(self) -> ClockedJob:
        """What the engines train."""
        return ClockedJob(self.make, self.data(), self.loss, None, self.batch_size, _FIRST + _COUNTED_STEPS)

    def costs(self) -> ModelCosts:
        """Counted on fake tensors."""
        inputs, targets = (part[: self.batch_size] for part in self.data())
        return layer_costs(self.make, inputs, loss_fn=self.loss, targets=targets)


SUBJECTS = (
    Subject("perceptron", make_perceptron, F.cross_entropy, 256, PERCEPTRON),
    Subject("gpt", make_gpt, next_word_loss, 16, TEXTS),
)


@dataclass
class Row:
    """One strategy: predicted and measured round by round.

    Attributes:
        rounds_s, own_rounds_s: medians of the rounds' steps, on the wall and by the clock of their busiest rank.
    """

    strategy: str
    predictions: list[Estimate] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    own_rounds_s: list[float] = field(default_factory=list)
    tensor_bytes: int = 0
    process_bytes: int = 0
    sent_bytes: int = 0

    @property
    def predicted(self) -> Estimate:
        """Of the last round: bytes are the same in all."""
        return self.predictions[-1]

    @property
    def predicted_s(self) -> float:
        """Median over all rounds."""
        return median(prediction.step_s for prediction in self.predictions)

    @property
    def measured_s(self) -> float:
        """Median over all rounds."""
        return median(self.rounds_s)

    @property
    def spread(self) -> float:
        """Of the middle half of the rounds, slowest over fastest, less one."""
        ordered = sorted(self.rounds_s)
        away = len(ordered) // 4
        return ordered[-1 - away] / ordered[away] - 1

    @property
    def time_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def own_s(self) -> float:
        """Median of the rounds by the clock of their busiest rank."""
        return median(self.own_rounds_s)

    @property
    def own_error(self) -> float:
        """The same of these."""
        return self.predicted_s / self.own_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.peak_bytes / self.tensor_bytes - 1


def run_on_engine(job: ClockedJob, strategy: str) -> tuple[list[float], list[float], dict[str, int], int]:
    """Times of the steps that count, on the wall and by this rank's own clock, memory, and bytes sent, of this rank."""
    warm_up(job)
    result = run_strategy(job, strategy)
    marks = job.__dict__["own_s"]
    own_times_s = [after - before for before, after in pairwise(marks)]
    return result.step_times_s[_FIRST:], own_times_s[_FIRST:], result.memory_bytes, result.boxed_bytes


def measure(session: Session, subject: Subject, rows: Sequence[Row], crowding: float) -> None:
    """One round: every strategy trained once."""
    job = subject.job()
    for row in rows:
        reports = session.submit(run_on_engine, job, row.strategy).result()
        row.rounds_s.append(_median_of_slowest([times for times, _, _, _ in reports]))
        row.own_rounds_s.append(crowding * _median_of_slowest([own for _, own, _, _ in reports]))
        row.process_bytes = max(row.process_bytes, *(memory["peak"] for _, _, memory, _ in reports))
        row.sent_bytes = sum(sent for _, _, _, sent in reports)
        if not row.tensor_bytes:
            row.tensor_bytes = max(session.submit(peak_allocated, job, row.strategy).result())
        print(f"  {row.strategy}: {row.rounds_s[-1] * 1e3:.0f} ms", file=sys.stderr, flush=True)


def _median_of_slowest(ranks: Sequence[Sequence[float]]) -> float:
    """A step is as long as its slowest rank's."""
    return median(max(times) for times in zip(*ranks, strict=True))


def predict(subject: Subject, costs: ModelCosts, num_engines: int, hardware: Hardware, rows: Sequence[Row]) -> None:
    """All strategies of a model, before any runs in this round."""
    for row in rows:
        resolved = Strategy(row.strategy).resolve(costs.layers, num_engines)
        row.predictions.append(estimate(costs, resolved, hardware, subject.batch_size, optimizer="momentum"))


def place_of_best(rows: Sequence[Row]) -> int:
    """Of the best measured strategy among the predictions, from 1; where several are alike, of the first of them."""
    least_s = (1 + _ALIKE) * min(row.measured_s for row in rows)
    best_s = min(row.predicted_s for row in rows if row.measured_s <= least_s)
    return 1 + sum(row.predicted_s < best_s for row in rows)


def ordered_share(rows: Sequence[Row]) -> float:
    """Of the pairs that really differ, those predicted in the right order."""
    pairs = [(a, b) for a, b in combinations(rows, 2) if abs(a.measured_s / b.measured_s - 1) > _DIFFERENT]
    right = [(a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s) for a, b in pairs]
    return sum(right) / len(right) if right else 1.0


def described(subject: Subject, num_engines: int, rows: Sequence[Row]) -> tuple[str, list[Comparison]]:
    """A table of the strategies, and what follows from it."""
    lines = [
        [row.strategy, f"{row.predicted_s * 1e3:.1f}", f"{row.measured_s * 1e3:.1f}",
         f"{row.time_error:+.0%}", f"{min(row.rounds_s) * 1e3:.0f} to {max(row.rounds_s) * 1e3:.0f}",
         f"{row.own_s * 1e3:.1f}", f"{row.own_error:+.0%}",
         format_bytes(row.predicted.peak_bytes), format_bytes(row.tensor_bytes), f"{row.memory_error:+.0%}",
         format_bytes(row.process_bytes),
         format_bytes(row.predicted.boxed_bytes), format_bytes(row.sent_bytes)]
        for row in sorted(rows, key=lambda row: row.measured_s)
    ]  # fmt: skip
    header = ["strategy", "predicted ms", "measured ms", "", "rounds", "own clock", "", "predicted tensors",
              "measured", "", "process", "predicted sent", "really sent"]  # fmt: skip
    times, memory = [abs(row.time_error) for row in rows], [abs(row.memory_error) for row in rows]
    name = f"{subject.name}, {num_engines} engines"
    judged = [
        Comparison(f"{name}: median error of the step", 100 * median(times), TIME_TARGET),
        Comparison(f"{name}: worst error of the memory", 100 * max(memory), MEMORY_TARGET),
        Comparison(f"{name}: place of the best strategy among the predictions", place_of_best(rows), PLACE_TARGET),
    ]
    worst = f"Worst error of a step {max(times):.0%}; median error of the memory {median(memory):.1%}; "
    worst += f"{ordered_share(rows):.0%} of the pairs that differ by more than {_DIFFERENT:.0%} in the right order. "
    spread = median(row.spread for row in rows)
    worst += f"The middle half of a strategy's {len(rows[0].rounds_s)} rounds is {spread:.0%} wide in the median. "
    own = median(abs(row.own_error) for row in rows)
    worst += f"Of steps by the busiest rank's own clock: median error {own:.0%}."
    return f"## {name}\n\n{table(header, lines)}\n\n{worst}\n", judged


class Stolen:
    """What part of this machine's cores its hypervisor gave to other machines since this was made."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float:
        """0 to 1; 0 where the system does not tell."""
        spent = [now - then for now, then in zip(psutil.cpu_times(), self._before, strict=True)]
        stolen = getattr(psutil.cpu_times(), "steal", 0.0) - getattr(self._before, "steal", 0.0)
        return stolen / sum(spent) if sum(spent) else 0.0


def show_hardware(hardware: Hardware) -> str:
    """The constants that were measured, on a few lines."""
    link = hardware.links[-1]
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in hardware.matmul_flops_per_s.items())
    return (
        f"{hardware.name}: products {rates} GFLOP/s (half at {hardware.matmul_half_size:.0f}), memory "
        f"{hardware.memory_bandwidth_bytes_per_s / 1e9:.1f} GB/s, weights "
        f"{hardware.weight_bytes_per_s / 1e9:.1f} GB/s, a function {hardware.op_s * 1e6:.0f} us, a step "
        f"{hardware.step_s * 1e6:.0f} us, boxing {link.latency_s * 1e6:.0f} us + "
        f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s, alone {hardware.alone_speedup:.2f} times as fast."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, predict, train, and keep the tables, one file for each number of engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=[subject.name for subject in SUBJECTS])
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--strategies", type=int, default=12, help="of each model, the first so many")
    options = parser.parse_args(arguments)
    subjects = [subject for subject in SUBJECTS if subject.name in options.models]
    for num_engines in options.engines:
        sections, judged = _compare(subjects, num_engines, options.rounds, options.strategies)
        title = f"Predicted and measured on this machine, {num_engines} engines"
        publish(f"planner-truth-{num_engines}-engines", title, "\n".join(sections), judged)
    return 0


def _compare(
    subjects: Sequence[Subject], num_engines: int, num_rounds: int, num_strategies: int
) -> tuple[list[str], list[Comparison]]:
    """Rounds of all models; (sections of the report, what is judged)."""
    costs = [subject.costs() for subject in subjects]
    tables = [[Row(text) for text in subject.strategies[num_engines][:num_strategies]] for subject in subjects]
    calibrations, stolen = [], Stolen()
    with Session(engines=num_engines, device="cpu") as session:
        for number in range(num_rounds):
            hardware = calibrate(session)
            assert isinstance(hardware, Hardware)
            calibrations.append(f"* {show_hardware(hardware)}")
            for subject, known, rows in zip(subjects, costs, tables, strict=True):
                predict(subject, known, num_engines, hardware, rows)
                measure(session, subject, rows[:: -1 if number % 2 else 1], hardware.alone_speedup)
    sections, judged = list[str](), list[Comparison]()
    for subject, rows in zip(subjects, tables, strict=True):
        section, comparisons = described(subject, num_engines, rows)
        sections, judged = [*sections, section], [*judged, *comparisons]
    gone = f"The hypervisor gave {stolen.share():.0%} of the cores' time to others. Calibrated before each round:\n"
    return [*sections, "\n".join([gone, *calibrations, ""])], judged


if __name__ == "__main__":
    sys.exit(main())
