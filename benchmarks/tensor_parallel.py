"""A training step of a small transformer with split weights, against torch's DTensor, on the same 2 and 4 processes.

    python -m benchmarks.tensor_parallel

12 blocks of width 64 on a batch of 8 x 32 positions, and 8 blocks of width 256 on 8 x 64: forward, backward and AdamW.
Both split q, k, v and the first layer of the perceptron by columns and the projections behind them by rows: torch with
``parallelize_module``, the workbench with the strategy ``*: model``. Both start from the same weights; at the end their
weights must agree.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import workbench as wb
from benchmarks.harness import interleave, launch_or_work, medians, together
from benchmarks.reporting import Comparison, Target, publish, side_by_side, table

NUM_PROCESSES = (2, 4)


@dataclass(frozen=True)
class Size:
    """A transformer, its batch, and how often faster than DTensor its step should be."""

    num_blocks: int
    width: int
    head_size: int
    batch: int
    length: int
    target: Target
    share_of_rounds: float = 1.0

    def __str__(self) -> str:
        return f"{self.num_blocks} blocks of width {self.width}, batch {self.batch} x {self.length}"

    def model(self) -> nn.Module:
        """The same weights on every call and every rank."""
        torch.manual_seed(0)
        return nn.Sequential(*(Block(self.width, self.head_size) for _ in range(self.num_blocks)))


SIZES = (
    Size(12, 64, 16, 8, 32, Target(4.0, at_least=True)),
    Size(8, 256, 32, 8, 64, Target(2.0, at_least=True), share_of_rounds=0.25),
)
_COLUMNS, _ROWS = ("q", "k", "v", "fc1"), ("o", "fc2")
_LARGEST_WEIGHT_DIFFERENCE = 1e-3
_LEARNING_RATE = 1e-4
_OURS, _THEIRS = "workbench, *: model", "DTensor, parallelize_module"


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length, width), as ``x``."""
        y = self.norm1(x)
        q, k, v = (self._heads(layer(y)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_size).transpose(1, 2)


class Training:
    """A model and AdamW; call it for one step on the same batch."""

    def __init__(self, model: nn.Module, size: Size) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
        shape = (size.batch, size.length, size.width)
        self.batch = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def with_dtensor(size: Size) -> nn.Module:
    """The model under torch's tensor parallelism."""
    mesh = init_device_mesh("cpu", (wb.world_size(),))
    plan = {f"{i}.{name}": ColwiseParallel() for i in range(size.num_blocks) for name in _COLUMNS}
    rows = {f"{i}.{name}": RowwiseParallel() for i in range(size.num_blocks) for name in _ROWS}
    return parallelize_module(size.model(), mesh, {**plan, **rows})


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Between the weights of the two models, the largest absolute difference."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((_whole(a) - _whole(b)).abs().max()) for a, b in pairs)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    is_spread = isinstance(parameter, (DTensor, wb.GlobalTensor))
    return (parameter.full_tensor() if is_spread else parameter).detach()  # type: ignore[attr-defined]


def compare(size: Size, rounds: int, calls: int) -> tuple[list[list[str]], Comparison]:
    """Rows of the table, and the step beside DTensor's."""
    trainings = {
        "one process": Training(size.model(), size),
        _THEIRS: Training(with_dtensor(size), size),
        _OURS: Training(wb.parallelize(size.model(), "*: model"), size),
    }
    rounds = max(1, round(rounds * size.share_of_rounds))
    time_s = medians(interleave(trainings, rounds, calls, around=together))
    difference = largest_difference(trainings[_OURS].model, trainings[_THEIRS].model)
    if not difference <= _LARGEST_WEIGHT_DIFFERENCE:
        raise AssertionError(f"the two did not train alike: weights differ by {difference:.1e}")
    rows = [[f"{size}: {name}", f"{time * 1e3:.1f}", f"{1 / time:.1f}"] for name, time in time_s.items()]
    return rows, side_by_side(str(size), time_s[_OURS], "DTensor", time_s[_THEIRS], size.target)


def work(rounds: int, calls: int) -> None:
    """What each of the processes runs; the first one prints."""
    wb.init()
    found = [compare(size, rounds, calls) for size in SIZES]
    if wb.rank() == 0:
        how = (
            f"AdamW, {wb.world_size()} processes over {wb.init().transport_name}, one thread each; medians of up to "
            f"{rounds} rounds of {calls} steps. One process computes the whole on each of the {wb.world_size()}. "
            f"Afterwards the weights of the two agree within {_LARGEST_WEIGHT_DIFFERENCE:.0e}."
        )
        rows = [row for rows, _ in found for row in rows]
        body = f"{how}\n\n{table(['', 'step, ms', 'steps/s'], rows)}"
        title = f"Tensor parallel against torch, {wb.world_size()} processes"
        publish(f"tensor-parallel-{wb.world_size()}", title, body, [judged for _, judged in found])
    dist.barrier()


if __name__ == "__main__":
    sys.exit(launch_or_work("benchmarks.tensor_parallel", __doc__, NUM_PROCESSES, work, rounds=30, calls=2))
