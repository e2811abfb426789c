"""Memory of a training under split weights: what a rank holds against the size of its shards, and growth over steps.

    python -m benchmarks.memory

A transformer with AdamW on two processes. A rank should hold its shards, their gradients and two moments of each, and
nothing that grows: after the first steps the resident size stays, and so do the caches of plans and layouts.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

import psutil
import torch
import torch.distributed as dist
from torch import nn

import workbench as wb
from benchmarks.harness import launch_or_work
from benchmarks.reporting import Comparison, Target, publish, table
from benchmarks.tensor_parallel import SIZES, Training
from workbench.tensors.world import current
from workbench.training.diagnostics.memory import model_memory
from workbench.units import format_bytes

NUM_PROCESSES, NUM_BLOCKS = 2, 2
WARM_STEPS = 500
TARGET = Target(1.02)
_MB = 1e6


def shard_bytes(model: nn.Module) -> int:
    """Bytes of this rank's shards by their layouts alone."""
    sizes = []
    for parameter in model.parameters():
        assert isinstance(parameter, wb.GlobalTensor)
        shape = parameter.layout_on_ranks.local_shape(tuple(parameter.shape), wb.rank())
        sizes.append(torch.Size(shape).numel() * parameter.element_size())
    return sum(sizes)


def resident_bytes() -> int:
    """Resident size of this process, garbage collected first."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def work(steps: int) -> None:
    """What each of the processes runs; the first one prints."""
    wb.init()
    size = replace(SIZES[0], num_blocks=NUM_BLOCKS)
    model = wb.parallelize(size.model(), "*: model")
    training = Training(model, size)
    for _ in range(WARM_STEPS):
        training()
    caches = len(current().plans), len(current().specs)
    before = resident_bytes()
    for _ in range(steps):
        training()
    growth = resident_bytes() - before
    held = model_memory(model, training.optimizer)
    shards = shard_bytes(model)
    expected = {"parameters": shards, "gradients": shards, "optimizer": 2 * shards}
    if wb.rank() == 0:
        rows = [[kind, f"{held[kind] / _MB:.3f}", f"{size / _MB:.3f}"] for kind, size in expected.items()]
        held_and_expected = table(["", "held, MB", "shards, MB"], rows)
        body = (
            f"{NUM_BLOCKS} blocks, AdamW, {NUM_PROCESSES} processes, rank 0.\n\n{held_and_expected}\n\nOver {steps} "
            f"steps after the first {WARM_STEPS} the resident size changed by {growth / _MB:+.2f} MB; "
            f"plans went from {caches[0]} to {len(current().plans)}, layouts with shapes from {caches[1]} to "
            f"{len(current().specs)}."
        )
        bytes_held = sum(held[kind] for kind in expected)
        judged = Comparison("held / shards", bytes_held / sum(expected.values()), TARGET, format_bytes(bytes_held))
        publish("memory", "Memory of a rank under split weights", body, [judged])
    dist.barrier()


if __name__ == "__main__":
    sys.exit(launch_or_work("benchmarks.memory", __doc__, [NUM_PROCESSES], work, steps=1000))
