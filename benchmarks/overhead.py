"""What a global tensor costs per operation, against torch's DTensor: forward, 8x8, on one rank and on two.

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
from benchmarks.harness import geometric_mean, interleave, is_launched, launch, medians
from benchmarks.reporting import Target, publish, side_by_side, table

SIZE = 8
TARGET = Target(0.5)
Operation = Callable[["Operands"], object]
OPERATIONS: dict[str, Operation] = {
    "add": lambda on: on.x + on.y,
    "relu": lambda on: F.relu(on.x),
    "linear": lambda on: F.linear(on.x, on.weight, on.bias),
    "view": lambda on: on.x.view(-1, 2, SIZE // 2),
    "layer_norm": lambda on: F.layer_norm(on.x, (SIZE,), on.bias, on.bias),
    "softmax": lambda on: F.softmax(on.x, dim=-1),
    "sum": lambda on: on.x.sum(-1),
    "cat": lambda on: torch.cat([on.x, on.y], dim=1),
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
    """Plain tensors of the shard's size, DTensors and global tensors in the world of all processes."""
    world_size = wb.init().world_size
    if world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (world_size,))
    everywhere = wb.placement.all("cpu")
    # Detached, so that the results are leaves of the graph, as parameters and inputs are.
    return {
        "plain": operands(lambda t: t.tensor_split(world_size)[0].contiguous(), lambda t: t),
        "DTensor": operands(
            lambda t: DTensor.from_local(t.tensor_split(world_size)[dist.get_rank()], mesh, [Shard(0)]).detach(),
            lambda t: DTensor.from_local(t, mesh, [Replicate()]).detach(),
        ),
        "global": operands(
            lambda t: wb.to_global(t, placement=everywhere, sbp="B").to_global(sbp="S(0)").detach(),
            lambda t: wb.to_global(t, placement=everywhere, sbp="B").detach(),
        ),
    }


def measure(rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Median seconds per call by operation and kind of tensor."""
    on = all_operands()
    found = {}
    for name, operation in OPERATIONS.items():
        actions = {kind: lambda run=operation, values=values: run(values) for kind, values in on.items()}
        found[name] = medians(interleave(actions, rounds, calls))
    return found


def report(time_s: dict[str, dict[str, float]], num_processes: int, how: str) -> None:
    """Print and keep the table of one world size; the ratio that counts is the geometric mean."""
    ratios = {name: (t["global"] - t["plain"]) / (t["DTensor"] - t["plain"]) for name, t in time_s.items()}
    rows = [[name, *(f"{t[kind] * 1e6:.1f}" for kind in t), f"{ratios[name]:.2f}"] for name, t in time_s.items()]
    header = ["operation", "plain, us", "DTensor, us", "global, us", "overhead, global / DTensor"]
    worst = max(ratios, key=ratios.__getitem__)
    body = (
        f"Forward at {SIZE}x{SIZE}, rows split over {num_processes} rank{'s' * (num_processes > 1)}, one thread each; "
        f"{how}.\n\n{table(header, rows)}\n\n"
        f"The ratio below is the geometric mean; the worst is that of {worst}, {ratios[worst]:.2f}."
    )
    title = f"Overhead of an operation, {num_processes} rank{'s' * (num_processes > 1)}"
    ours, theirs = (geometric_mean([t[kind] - t["plain"] for t in time_s.values()]) for kind in ("global", "DTensor"))
    publish(f"overhead-{num_processes}", title, body, [side_by_side("geometric mean", ours, "DTensor", theirs, TARGET)])


def main() -> int:
    """Measure in a world of one rank, then in one of two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=20, help="per round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    time_s = measure(args.rounds, args.calls)
    if not is_launched() or dist.get_rank() == 0:
        report(time_s, dist.get_world_size(), f"medians of {args.rounds} rounds of {args.calls} calls")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if is_launched() else launch("benchmarks.overhead", 2, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
