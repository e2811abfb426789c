"""What a global tensor costs per operation, against torch's DTensor: forward, 8x8, one rank, one thread.

    python -m benchmarks.overhead

The overhead is the time above that of the same operation on plain tensors. Activations are split over the rows and
parameters are replicated, as under data parallelism, and parameters take gradients, as in training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import workbench as wb
from benchmarks.harness import Target, interleave, medians, publish, table

SIZE = 8
TARGET = Target(0.6)
Operation = Callable[["Operands"], object]
Make = Callable[[torch.Tensor], torch.Tensor]
OPERATIONS: dict[str, Operation] = {
    "add": lambda on: on.x + on.y,
    "relu": lambda on: F.relu(on.x),
    "linear": lambda on: F.linear(on.x, on.weight, on.bias),
    "layer_norm": lambda on: F.layer_norm(on.x, (SIZE,), on.bias, on.bias),
}


@dataclass(frozen=True)
class Operands:
    """Two activations (rows split) and two parameters (replicated) of one kind of tensor."""

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor


def operands(
    activation: Callable[[torch.Tensor], torch.Tensor], parameter: Callable[[torch.Tensor], torch.Tensor]
) -> Operands:
    """The same numbers as one kind of tensor."""
    generator = torch.Generator().manual_seed(0)
    x, y, weight = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(3))
    bias = torch.randn(SIZE, generator=generator)
    return Operands(activation(x), activation(y), parameter(weight).requires_grad_(), parameter(bias).requires_grad_())


def all_operands() -> dict[str, Operands]:
    """Plain tensors, DTensors and global tensors in a world of one rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    wb.init()
    here = wb.placement.all("cpu")
    # Detached, so that the results are leaves of the graph, as parameters and inputs are.
    return {
        "plain": operands(lambda t: t, lambda t: t),
        "DTensor": operands(
            lambda t: DTensor.from_local(t, mesh, [Shard(0)]).detach(),
            lambda t: DTensor.from_local(t, mesh, [Replicate()]).detach(),
        ),
        "global": operands(
            lambda t: wb.to_global(t, placement=here, sbp=wb.sbp.split(0)).detach(),
            lambda t: wb.to_global(t, placement=here, sbp=wb.sbp.broadcast).detach(),
        ),
    }


def measure(operation: Operation, on: dict[str, Operands], rounds: int, calls: int) -> dict[str, float]:
    """Median seconds per call for every kind of tensor."""
    actions = {kind: lambda values=values: operation(values) for kind, values in on.items()}
    return medians(interleave(actions, rounds, calls))


def main() -> int:
    """Print the table; the ratio that counts is the worst one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--calls", type=int, default=20, help="per round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    on = all_operands()
    rows, ratios = [], []
    for name, operation in OPERATIONS.items():
        time_s = measure(operation, on, args.rounds, args.calls)
        ratios.append((time_s["global"] - time_s["plain"]) / (time_s["DTensor"] - time_s["plain"]))
        rows.append([name, *(f"{time_s[kind] * 1e6:.1f}" for kind in on), f"{ratios[-1]:.2f}"])
    header = ["operation", *(f"{kind}, us" for kind in on), "overhead, global / DTensor"]
    how = f"Forward at {SIZE}x{SIZE}, one rank, one thread; medians of {args.rounds} rounds of {args.calls} calls."
    worst = f"The ratio below is that of {rows[ratios.index(max(ratios))][0]}, the worst."
    body = f"{how}\n\n{table(header, rows)}\n\n{worst}"
    publish("overhead", "Overhead per operation: global tensor against DTensor", body, max(ratios), TARGET)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
