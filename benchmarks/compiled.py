"""A captured and compiled training step against torch's own parallelism with torch.compile, in turns.

    python -m benchmarks.compiled

Forward, backward and AdamW of transformers without dropout and of a convolution network on two processes, as in
``benchmarks.capture``. Theirs are DistributedDataParallel, FSDP2 and DTensor's tensor parallelism, compiled by
`module.compile()`, the last two block by block; ours are data and model parallel, compiled by
`wb.capture(step, backend="inductor")`. All train alike; at the end their weights must agree. Beside the captured step
without a compiler, ours is to gain what DistributedDataParallel gains from compiling, or 1.1 times. The
seconds of compiling are those of the steps until the first compiled one has run, with whatever Inductor finds on disk.
Tensor parallelism has one model: torch 2.13 ends in a RecursionError when it compiles DTensor blocks of the first one
after the other ways.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch._dynamo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import workbench as wb
from benchmarks.capture import MODELS, STEPS_BEFORE, Step, make_model, step_of, train_in_turns
from benchmarks.harness import launch_or_work, together
from benchmarks.reporting import Target, publish, side_by_side, table
from benchmarks.resnet import no_norm, resnet_small
from workbench.tensors.world import World, current

NUM_PROCESSES = 2
AGAINST_DDP, GAIN = Target(1.05, at_least=True), 1.1
AGAINST_DTENSOR = Target(1.5, at_least=True)
_RECOMPILE_LIMIT = 64
"""Of theirs. torch compiles a block at most 8 times, and runs the blocks of deeper models as they are."""


class LlamaBlock(nn.Module):
    """Causal attention of heads of 16 and a SwiGLU perceptron, each behind an RMS norm and beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3 // 16 * 16
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.fc1, self.gate = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.fc2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length, width), as ``x``."""
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.fc2(nn.functional.silu(self.fc1(y)) * self.gate(y))


class Case(NamedTuple):
    """A model.

    Attributes:
        make: the same weights on every call and every rank.
        shape: of a batch.
        columns, rows: names of the linear layers of a block that tensor parallelism splits by columns and by rows; none
            if it does not split the model.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


def _llama(num_blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(LlamaBlock(width) for _ in range(num_blocks)))


def _resnet() -> nn.Module:
    torch.manual_seed(0)
    return resnet_small(no_norm)


_COLUMNS, _ROWS = ("q", "k", "v", "fc1"), ("o", "fc2")
CASES = {
    name: Case(partial(make_model, blocks, width), (rows, length, width))
    for name, (blocks, width, rows, length) in MODELS.items()
} | {
    "Llama-like, 8 x 256": Case(partial(_llama, 8, 256), (8, 64, 256), (*_COLUMNS, "gate"), _ROWS),
    "ResNet": Case(_resnet, (32, 3, 32, 32)),
}  # fmt: skip


def candidates(world: World, case: Case) -> dict[str, tuple[nn.Module, Step]]:
    """The ways to make one step."""
    batch = torch.randn(case.shape, generator=torch.Generator().manual_seed(1))
    parts = world.world_size
    own = batch.chunk(parts)[world.rank]
    ways: dict[str, tuple[nn.Module, Step]] = {}
    for name, is_compiled in (("DDP", False), ("DDP, compiled", True)):
        plain = case.make()
        module: nn.Module = DistributedDataParallel(plain)
        if is_compiled:
            module.compile()
        ways[name] = plain, partial(step_of(module), own)
    sharded = _sharded(case.make())
    ways["FSDP2, compiled"] = sharded, partial(step_of(sharded), own)
    ours = [
        ("captured", f"*: data | 1x{parts}x1", None),
        ("captured, compiled", f"*: data | 1x{parts}x1", "inductor"),
    ]
    if case.columns:
        split = _split(case, parts)
        ways["DTensor, compiled"] = split, partial(step_of(split), batch)
        ours.append(("captured, compiled, model parallel", f"*: model | 1x1x{parts}", "inductor"))
    for name, strategy, backend in ours:
        model = wb.parallelize(case.make(), strategy)
        step = wb.capture(step_of(model), backend=backend)
        ways[name] = model, partial(step, batch)
    return ways


def _sharded(model: nn.Module) -> nn.Module:
    """Compiled and sharded by FSDP2 block by block: its hooks between blocks are not compiled."""
    for block in model.children():
        block.compile()
        fully_shard(block)
    fully_shard(model)
    return model


def _split(case: Case, parts: int) -> nn.Module:
    """With linear layers split by DTensor, first by columns, then by rows, and compiled block by block."""
    model = case.make()
    mesh = init_device_mesh("cpu", (parts,))
    columns = {name: ColwiseParallel() for name in case.columns}
    rows = {name: RowwiseParallel() for name in case.rows}
    for block in model.children():
        parallelize_module(block, mesh, {**columns, **rows})
        block.compile()
    return model


def work(rounds: int, calls: int) -> None:
    """What each of the processes runs; the first one prints."""
    torch.set_num_threads(1)
    wb.init()
    world = current()
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
    rows, judged = [], []
    for name, case in CASES.items():
        ways = candidates(world, case)
        time_s, first_s = train_in_turns(ways, rounds, calls, together)
        ours = time_s["captured, compiled"]
        gain = Target(round(min(GAIN, time_s["DDP"] / time_s["DDP, compiled"]), 2), at_least=True)
        judged += [
            side_by_side(f"{name}", ours, "DDP, compiled", time_s["DDP, compiled"], AGAINST_DDP),
            side_by_side(f"{name}", ours, "FSDP2, compiled", time_s["FSDP2, compiled"], AGAINST_DDP),
            side_by_side(f"{name}", ours, "captured", time_s["captured"], gain),
        ]
        if case.columns:
            ours, theirs = time_s["captured, compiled, model parallel"], time_s["DTensor, compiled"]
            judged.append(side_by_side(f"{name}, model parallel", ours, "DTensor, compiled", theirs, AGAINST_DTENSOR))
        rows += [[f"{name}: {way}", f"{time_s[way] * 1e3:.1f}", f"{first_s[way]:.1f}"] for way in ways]
    if world.rank == 0:
        how = f"{world.world_size} processes, one thread each; medians of {rounds} rounds of {calls} steps."
        header = ["model: way", "step, ms", f"first {STEPS_BEFORE} steps, s"]
        publish("compiled", "Compiled steps, 2 processes", f"{how}\n\n{table(header, rows)}", judged)
    torch.distributed.barrier()


if __name__ == "__main__":
    sys.exit(launch_or_work("benchmarks.compiled", __doc__, [NUM_PROCESSES], work, rounds=20, calls=2))
