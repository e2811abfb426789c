"""A training step of a small transformer with split weights, against torch's DTensor, on the same two processes.

    python -m benchmarks.tensor_parallel

12 blocks of width 64 on a batch of 8 x 32 positions: forward, backward and AdamW. Both split q, k, v and the first
layer of the perceptron by columns and the projections behind them by rows: torch with ``parallelize_module``, the
workbench with the strategy ``*: model``. Both start from the same weights; at the end their weights must agree.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import workbench as wb
from benchmarks.harness import Target, interleave, is_launched, launch, medians, publish, table, together

NUM_PROCESSES = 2
NUM_BLOCKS, WIDTH, HEAD_SIZE, BATCH, LENGTH = 12, 64, 16, 8, 32
TARGET = Target(2.5, at_least=True)
_COLUMNS, _ROWS = ("q", "k", "v", "fc1"), ("o", "fc2")
_LARGEST_WEIGHT_DIFFERENCE = 1e-3
_LEARNING_RATE = 1e-4


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length, width), as ``x``."""
        y = self.norm1(x)
        q, k, v = (_heads(layer(y)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], -1, HEAD_SIZE).transpose(1, 2)


class Training:
    """A model and AdamW; call it for one step on the same batch."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
        self.batch = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def make_model() -> nn.Module:
    """The same weights on every call and every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def with_dtensor() -> nn.Module:
    """The model under torch's tensor parallelism."""
    mesh = init_device_mesh("cpu", (NUM_PROCESSES,))
    plan = {f"{i}.{name}": ColwiseParallel() for i in range(NUM_BLOCKS) for name in _COLUMNS}
    rows = {f"{i}.{name}": RowwiseParallel() for i in range(NUM_BLOCKS) for name in _ROWS}
    return parallelize_module(make_model(), mesh, {**plan, **rows})


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Between the weights of the two models, the largest absolute difference."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((_whole(a) - _whole(b)).abs().max()) for a, b in pairs)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    is_spread = isinstance(parameter, (DTensor, wb.GlobalTensor))
    return (parameter.full_tensor() if is_spread else parameter).detach()  # type: ignore[attr-defined]


def work(rounds: int, calls: int) -> None:
    """What each of the processes runs; the first one prints."""
    wb.init()
    ours, theirs = "workbench, *: model", "DTensor, parallelize_module"
    trainings = {
        "one process": Training(make_model()),
        theirs: Training(with_dtensor()),
        ours: Training(wb.parallelize(make_model(), "*: model")),
    }
    time_s = medians(interleave(trainings, rounds, calls, around=together))
    difference = largest_difference(trainings[ours].model, trainings[theirs].model)
    if not difference <= _LARGEST_WEIGHT_DIFFERENCE:
        raise AssertionError(f"the two did not train alike: weights differ by {difference:.1e}")
    if wb.rank() == 0:
        rows = [[name, f"{time * 1e3:.1f}", f"{1 / time:.1f}"] for name, time in time_s.items()]
        how = (
            f"{NUM_BLOCKS} blocks of width {WIDTH}, batch {BATCH} x {LENGTH}, AdamW, {NUM_PROCESSES} processes over "
            f"{wb.init().transport_name}, one thread each; medians of {rounds} rounds of {calls} steps. One process "
            f"computes the whole on each of the {NUM_PROCESSES}. Afterwards the weights of the two differ by "
            f"{difference:.0e}."
        )
        body = f"{how}\n\n{table(['', 'step, ms', 'steps/s'], rows)}"
        publish("tensor-parallel", "Tensor parallel against torch", body, time_s[theirs] / time_s[ours], TARGET)
    dist.barrier()


def main() -> int:
    """Launch, or work if this process has been launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=2, help="steps per round")
    args = parser.parse_args()
    if not is_launched():
        return launch("benchmarks.tensor_parallel", NUM_PROCESSES, sys.argv[1:])
    work(args.rounds, args.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
