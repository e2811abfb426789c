"""A captured and compiled training step against torch's own parallelism with torch.compile, in turns.

    python -m benchmarks.compiled

Forward, backward and AdamW of transformers without dropout on two processes, as in ``benchmarks.capture``. Theirs are
DistributedDataParallel, FSDP2 and DTensor's tensor parallelism, compiled by `module.compile()`; ours are data and model
parallel, compiled by `wb.capture(step, backend="inductor")`. All train alike; at the end their weights must agree. The
seconds of compiling are those of the steps until the first compiled one has run, with whatever Inductor finds on disk.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import workbench as wb
from benchmarks.capture import MODELS, STEPS_BEFORE, Step, make_model, step_of, train_in_turns
from benchmarks.harness import launch_or_work, together
from benchmarks.reporting import Target, publish, side_by_side, table
from workbench.tensors.world import World, current

NUM_PROCESSES = 2
AGAINST_DDP, AGAINST_CAPTURED = Target(1.05, at_least=True), Target(1.1, at_least=True)
AGAINST_DTENSOR = Target(1.5, at_least=True)
_COLUMNS, _ROWS = ("q", "k", "v", "fc1"), ("o", "fc2")


def candidates(world: World, num_blocks: int, width: int, rows: int, length: int) -> dict[str, tuple[nn.Module, Step]]:
    """The ways to make one step."""
    batch = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(1))
    parts = world.world_size
    own = batch.chunk(parts)[world.rank]
    ways: dict[str, tuple[nn.Module, Step]] = {}
    for name, is_compiled in (("DDP", False), ("DDP, compiled", True)):
        plain = make_model(num_blocks, width)
        module: nn.Module = DistributedDataParallel(plain)
        if is_compiled:
            module.compile()
        ways[name] = plain, partial(step_of(module), own)
    sharded, split = _sharded(make_model(num_blocks, width)), _split(make_model(num_blocks, width), parts)
    ways["FSDP2, compiled"] = sharded, partial(step_of(sharded), own)
    ways["DTensor, compiled"] = split, partial(step_of(split), batch)
    for name, strategy, backend in (
        ("captured", f"*: data | 1x{parts}x1", None),
        ("captured, compiled", f"*: data | 1x{parts}x1", "inductor"),
        ("captured, compiled, model parallel", f"*: model | 1x1x{parts}", "inductor"),
    ):
        model = wb.parallelize(make_model(num_blocks, width), strategy)
        ours = wb.capture(step_of(model), backend=backend)
        ways[name] = model, partial(ours, batch)
    return ways


def _sharded(model: nn.Module) -> nn.Module:
    """Compiled and sharded by FSDP2 block by block: its hooks between blocks are not compiled."""
    for block in model.children():
        block.compile()
        fully_shard(block)
    fully_shard(model)
    return model


def _split(model: nn.Module, parts: int) -> nn.Module:
    """With linear layers split by DTensor, first by columns, then by rows."""
    mesh = init_device_mesh("cpu", (parts,))
    columns = {name: ColwiseParallel() for name in _COLUMNS}
    rows = {name: RowwiseParallel() for name in _ROWS}
    for block in model.children():
        parallelize_module(block, mesh, {**columns, **rows})
    model.compile()
    return model


def work(rounds: int, calls: int) -> None:
    """What each of the processes runs; the first one prints."""
    torch.set_num_threads(1)
    wb.init()
    world = current()
    rows, judged = [], []
    for name in MODELS:
        ways = candidates(world, *MODELS[name])
        time_s, first_s = train_in_turns(ways, rounds, calls, together)
        ours = time_s["captured, compiled"]
        judged += [
            side_by_side(f"{name}", ours, "DDP, compiled", time_s["DDP, compiled"], AGAINST_DDP),
            side_by_side(f"{name}", ours, "FSDP2, compiled", time_s["FSDP2, compiled"], AGAINST_DDP),
            side_by_side(f"{name}", ours, "captured", time_s["captured"], AGAINST_CAPTURED),
            side_by_side(
                f"{name}, model parallel",
                time_s["captured, compiled, model parallel"],
                "DTensor, compiled",
                time_s["DTensor, compiled"],
                AGAINST_DTENSOR,
            ),
        ]
        rows += [[f"{name}: {way}", f"{time_s[way] * 1e3:.1f}", f"{first_s[way]:.1f}"] for way in ways]
    if world.rank == 0:
        how = f"{world.world_size} processes, one thread each; medians of {rounds} rounds of {calls} steps."
        header = ["blocks x width", "step, ms", f"first {STEPS_BEFORE} steps, s"]
        publish("compiled", "Compiled steps, 2 processes", f"{how}\n\n{table(header, rows)}", judged)
    torch.distributed.barrier()


if __name__ == "__main__":
    sys.exit(launch_or_work("benchmarks.compiled", __doc__, [NUM_PROCESSES], work, rounds=20, calls=2))
