"""Kernels on a GPU: moving blocks against a plain copy of as many bytes, the loss against torch's own. Needs CUDA.

    python -m benchmarks.kernels

Bandwidth counts bytes read and written. The loss is forward and backward of a cross entropy over 32,000 classes. Times
are the GPU's own, of its work alone: it is given other work first, which pushes what was there out of its caches and
lasts until Python has launched what is timed. No GPU was at hand yet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.reporting import Comparison, Target, publish, side_by_side, table
from workbench.kernels.blocks import move_blocks, pack, unpack
from workbench.kernels.cross_entropy_terms import cross_entropy_terms
from workbench.units import format_bytes

SIZES_BYTES = (64 * 2**20, 256 * 2**20)
ROWS, CLASSES = 4096, 32_000
BANDWIDTH_TARGET, LOSS_TARGET = Target(0.85, at_least=True), Target(1.5, at_least=True)
MEMORY_TARGET = Target(1.0)
OTHER_WORK_BYTES, OTHER_WORK_TIMES = 2**30, 8
"""Written before every timed action: 2 ms at 4 TB/s."""
Action = Callable[[], object]


def median_s(actions: dict[str, Action], rounds: int, device: str = "cuda") -> dict[str, float]:
    """Median seconds of each action, in turns, by the GPU's own clock."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    other_work = torch.empty(OTHER_WORK_BYTES, dtype=torch.uint8, device=device)
    for round_number in range(rounds + 1):
        for name, action in actions.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(OTHER_WORK_TIMES):
                other_work.zero_()
            start.record()
            action()
            stop.record()
            stop.synchronize()
            if round_number:
                times[name].append(start.elapsed_time(stop) / 1e3)
    return {name: median(values) for name, values in times.items()}


def moves(num_bytes: int, device: str = "cuda") -> dict[str, tuple[Action, int]]:
    """Ways to move blocks, and how many bytes each reads and writes."""
    side = int((num_bytes / 4) ** 0.5) // 64 * 64
    source = torch.randn(side, side, device=device)
    out, size = torch.empty_like(source), source.nbytes
    terms = [torch.randn(side // 4, side, device=device) for _ in range(4)]
    quarter = torch.empty_like(terms[0])
    columns = [((0, side), (i * side // 4, (i + 1) * side // 4)) for i in range(4)]
    pieces = pack(source, columns)
    return {
        "plain copy": (partial(out.copy_, source), 2 * size),
        "pull of 4 slices": (lambda: move_blocks(list(out.chunk(4)), list(source.chunk(4)), [1] * 4, "none"), 2 * size),
        "pull and sum of 4": (lambda: move_blocks([quarter], terms, [4], "sum"), 5 * quarter.nbytes),
        "pack by columns": (lambda: pack(source, columns), 2 * size),
        "unpack by columns": (lambda: unpack(pieces, columns, out), 2 * size),
    }


def losses(rows: int = ROWS, classes: int = CLASSES, device: str = "cuda") -> dict[str, Action]:
    """Forward and backward of the same loss: torch's, and ours over all classes as one slice of them."""
    logits = torch.randn(rows, classes, device=device, requires_grad=True)
    target = torch.randint(classes, (rows,), device=device)

    def ours() -> tuple[torch.Tensor, ...]:
        lse, picked, _ = cross_entropy_terms(logits, target, 0)
        return torch.autograd.grad((lse - picked).mean(), logits)

    return {"torch": lambda: torch.autograd.grad(F.cross_entropy(logits, target), logits), "cross_entropy_terms": ours}


def peak_bytes(action: Action) -> int:
    """Most memory that an action allocates above what is there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA device; here is none.")
        return 0
    device = torch.cuda.get_device_name()
    rows, worst = [], []
    for num_bytes in SIZES_BYTES:
        every = moves(num_bytes)
        time_s = median_s({name: action for name, (action, _) in every.items()}, args.rounds)
        rates = {name: size / time_s[name] for name, (_, size) in every.items()}
        best = rates["plain copy"]
        worst.append(min(rate for name, rate in rates.items() if name != "plain copy") / best)
        rows += [
            [f"{num_bytes >> 20} MiB, {name}", f"{time_s[name] * 1e6:.0f}", f"{rate / 1e9:.0f}", f"{rate / best:.2f}"]
            for name, rate in rates.items()
        ]
    body = f"{device}, float32.\n\n{table(['', 'us', 'GB/s', 'of a copy'], rows)}"
    slowest = Comparison("slowest of all, bandwidth / copy", min(worst), BANDWIDTH_TARGET)
    publish("kernels-blocks", "Blocks against a plain copy", body, [slowest])
    actions = losses()
    time_s, memory = median_s(actions, args.rounds), {name: peak_bytes(action) for name, action in actions.items()}
    rows = [[name, f"{time_s[name] * 1e6:.0f}", f"{memory[name] / 1e6:.0f}"] for name in actions]
    body = f"{device}, {ROWS} x {CLASSES} logits, float32, both ways.\n\n{table(['', 'us', 'memory, MB'], rows)}"
    ours, theirs = memory["cross_entropy_terms"], memory["torch"]
    judged = [
        side_by_side("time", time_s["cross_entropy_terms"], "torch", time_s["torch"], LOSS_TARGET),
        Comparison("memory", ours / theirs, MEMORY_TARGET, format_bytes(ours), f"torch {format_bytes(theirs)}"),
    ]
    publish("kernels-loss", "Loss over classes", body, judged)
    return 0


if __name__ == "__main__":
    sys.exit(main())
