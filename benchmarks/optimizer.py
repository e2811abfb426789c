"""An optimizer's step on many small parameters, and what ZeRO leaves on each rank, against torch.

    python -m benchmarks.optimizer

One process first: AdamW (foreach) on 300 parameters of 16 x 16, plain and global. Then 2 and 4: a GPT under
DistributedDataParallel, ``data`` and ZeRO 1 to 3, time per step side by side and bytes per rank against the formula:
per number on n ranks, 8 bytes of AdamW's state become 8 / n (ZeRO 1), 4 of gradients 4 / n (2), 4 of values 4 / n (3).
These steps are measured in several launches: processes that are started anew are faster or slower by some percent. So
ratios are taken within a launch, and judged by their median over the launches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from benchmarks.harness import by_name, hand_in, interleave, is_launched, launch_often, medians, together
from benchmarks.reporting import (
    Comparison,
    Target,
    over_launches,
    publish,
    ratios_side_by_side,
    side_by_side,
    table,
)
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch
from workbench.training.diagnostics.memory import storage_bytes
from workbench.units import format_bytes

NUM_PARAMETERS, SIZE = 300, 16
NUM_PROCESSES, BATCH_SIZE, LENGTH = (2, 4), 8, 64
STEP, BYTES, PARITY = Target(1.2), Target(1.05), Target(1.0, at_least=True)
THEIRS = "DistributedDataParallel"
_LARGEST_WEIGHT_DIFFERENCE = 1e-4


def small_steps(rounds: int, calls: int) -> None:
    """The step on small parameters, in this process alone."""
    torch.set_num_threads(1)
    wb.init()
    here = wb.placement.all("cpu")
    values = [torch.randn(SIZE, SIZE) for _ in range(NUM_PARAMETERS)]
    plain = [nn.Parameter(value.clone()) for value in values]
    shared = [nn.Parameter(wb.tensor(value, placement=here, sbp="B")) for value in values]
    steps: dict[str, Callable[[], object]] = {}
    for name, parameters in (("plain tensors", plain), ("global tensors", shared)):
        torch.stack([p.sin().sum() for p in parameters]).sum().backward()
        steps[name] = torch.optim.AdamW(parameters, foreach=True).step
    time_s = medians(interleave(steps, rounds, calls))
    rows = [[name, f"{time * 1e3:.2f}", f"{time / NUM_PARAMETERS * 1e6:.1f}"] for name, time in time_s.items()]
    body = f"AdamW, foreach, {NUM_PARAMETERS} parameters of {SIZE} x {SIZE}, one process, medians of {rounds} rounds."
    text = f"{body}\n\n{table(['', 'step, ms', 'per parameter, us'], rows)}"
    ours, theirs = time_s["global tensors"], time_s["plain tensors"]
    judged = side_by_side("small parameters", ours, "plain torch", theirs, STEP)
    publish("optimizer", "An optimizer's step on global parameters", text, [judged])


class Training:
    """A GPT, AdamW and a fixed batch; call it for one step."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], part: slice, width: int, num_blocks: int) -> None:
        torch.manual_seed(0)
        self.model = wrap(GPT(width, num_blocks, 512, LENGTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        words = torch.randint(512, (BATCH_SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(1))[part]
        self.inputs, self.targets = words[:, :-1], words[:, 1:]

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        next_word_loss(self.model(self.inputs), self.targets).backward()
        self.optimizer.step()

    def bytes_held(self) -> tuple[int, int, int]:
        """Of the optimizer's state, gradients and parameters, on this rank."""
        state = [v for values in self.optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return storage_bytes(state), storage_bytes(grads), storage_bytes(self.model.parameters())


def work(rounds: int, calls: int, width: int, num_blocks: int) -> None:
    """What each of the processes of a launch runs; the first one hands in."""
    wb.init()
    share = BATCH_SIZE // wb.world_size()
    mine = slice(wb.rank() * share, (wb.rank() + 1) * share)
    trainings = {THEIRS: Training(DistributedDataParallel, mine, width, num_blocks)}
    for name, text in [("data", "*: data"), *((f"zero={n}", f"*: data | zero={n}") for n in (1, 2, 3))]:
        trainings[name] = Training(
            lambda model, text=text: wb.parallelize(model, text),  # type: ignore[misc]
            slice(None),
            width,
            num_blocks,
        )
    time_s = medians(interleave(trainings, rounds, calls, around=together))
    theirs = list(trainings[THEIRS].model.parameters())
    held = {name: training.bytes_held() for name, training in trainings.items()}
    for name, training in list(trainings.items())[1:]:
        pairs = zip(training.model.parameters(), theirs, strict=True)
        difference = max(float((p.full_tensor().detach() - q.detach()).abs().max()) for p, q in pairs)  # type: ignore[attr-defined]
        if not difference <= _LARGEST_WEIGHT_DIFFERENCE:
            raise AssertionError(
                f"{name} did not train like DistributedDataParallel: weights differ by {difference:.1e}"
            )
    if wb.rank() == 0:
        hand_in({"times": time_s, "held": held, "numbers": sum(p.numel() for p in theirs)})
    torch.distributed.barrier()


def report(launches: Sequence[Any], num: int, rounds: int, calls: int) -> None:
    """Print and keep the tables of what launches on ``num`` processes have handed in."""
    time_s = by_name([launch["times"] for launch in launches])
    held, num_numbers = launches[0]["held"], launches[0]["numbers"]
    ratios = {name: ratios_side_by_side(times, time_s[THEIRS]) for name, times in time_s.items()}
    rows = [
        [
            name,
            f"{median(time_s[name]) * 1e3:.1f}",
            f"{median(found):.2f}",
            f"{min(found):.2f} to {max(found):.2f}",
            *map(format_bytes, held[name]),
        ]
        for name, found in ratios.items()
    ]
    ours = [(name, times) for name, times in time_s.items() if name != THEIRS]
    judged = [over_launches(f"{name}, step", times, "DDP", time_s[THEIRS], PARITY) for name, times in ours]
    for stage in (1, 2, 3):
        formula = [8 * num_numbers / num]
        formula += [4 * num_numbers / num] * (stage - 1)
        names = ("optimizer", "gradients", "parameters")
        for what, measured, expected in zip(names, held[f"zero={stage}"], formula, strict=False):
            name = f"zero={stage}, bytes of {what} / formula"
            judged.append(Comparison(name, measured / expected, BYTES, format_bytes(measured)))
    header = ["", "step, ms", "speed / DDP", "over launches", "optimizer", "gradients", "parameters"]
    body = (
        f"GPT of {num_numbers / 1e6:.1f} M parameters, batch {BATCH_SIZE} x {LENGTH}, AdamW, {num} processes. "
        f"{len(launches)} launches, in each medians of {rounds} rounds of {calls} steps, all in turns; below "
        "are medians over the launches, of times and of their ratios to DistributedDataParallel's in the same launch."
        f"\n\n{table(header, rows)}"
    )
    publish(f"zero-{num}", f"ZeRO against DistributedDataParallel, {num} processes", body, judged)


def main() -> int:
    """Measure alone, then launch; or work if this process has been launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6, help="rounds in each launch")
    parser.add_argument("--calls", type=int, default=2, help="steps per round")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--engines", type=int, nargs="+", default=NUM_PROCESSES, help="processes: 2, 4 or both")
    args = parser.parse_args()
    if is_launched():
        work(args.rounds, args.calls, args.width, args.blocks)
        return 0
    small_steps(args.launches * args.rounds * 5, args.calls)
    for number in args.engines:
        launches = launch_often("benchmarks.optimizer", number, sys.argv[1:], args.launches)
        report(launches, number, args.rounds, args.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
