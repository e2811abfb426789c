"""Boxings between processes on ONE GPU: over CUDA IPC, over gloo (through the host), and a plain copy on the device.

    python -m benchmarks.one_gpu                     4 processes; needs a CUDA device
    python -m benchmarks.one_gpu --device cpu        the same program without one, over whatever CPU ranks use

NCCL refuses two ranks on one GPU, so gloo is what there is otherwise. Every boxing is compared with gloo's result
before it is timed, and a turn ends when the device has done its work. The plain copy is of the bytes of the rank's new
shard. Only what a GPU has measured is kept. No GPU was at hand yet.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist

import workbench as wb
from benchmarks.harness import Action, interleave, is_launched, launch, medians, together
from benchmarks.reporting import Comparison, Target, publish, side_by_side, table
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors.global_tensor import spec_of, wrap
from workbench.tensors.world import World, current
from workbench.transport.network.gloo import GlooTransport
from workbench.transport.network.hang_detector import HangDetector
from workbench.transport.rendezvous import join_rendezvous

NUM_PROCESSES = 4
SIZES = (2**20, 16 * 2**20, 256 * 2**20)
PAIRS = [("S(0)", "S(1)"), ("S(0)", "B"), ("P", "B"), ("P", "S(0)")]
JUDGED, TARGET = (256 * 2**20, "S(0)", "S(1)"), Target(10, at_least=True)


def gloo_world(init_method: str = "env://") -> World:
    """A second world of the same ranks, whose tensors travel over gloo."""
    here = current()
    hang_detector = HangDetector(join_rendezvous(init_method, here.rank, here.world_size, 1_000_000, 60.0), here.rank)
    transport = GlooTransport(here.rank, here.world_size, 60.0, hang_detector, here.device)
    return World(here.rank, here.world_size, here.device, transport)


def candidates(size: int, source: str, target: str, gloo: World) -> dict[str, Action]:
    """A boxing of a square float32 tensor of ``size`` bytes, by what it goes over; equal results are asserted."""
    here = current()
    side = round((size / 4) ** 0.5)
    layout = Layout.of(Placement.of(here.device.type, list(range(here.world_size))), source)
    generator = torch.Generator(here.device).manual_seed(1 + here.rank * (source == "P"))
    whole = torch.randn(side, side, generator=generator, device=here.device)
    shard = whole[tuple(slice(*bounds) for bounds in layout.region((side, side), here.rank))].clone()
    sbp = wb.sbp.broadcast if target == "B" else wb.sbp.split(int(target[2]))
    inputs: dict[str, Any] = {
        name: wrap(shard.clone(), spec_of(world, layout, (side, side)))
        for name, world in (("ours", here), ("gloo", gloo))
    }
    results = {name: x.to_global(sbp=sbp).to_local() for name, x in inputs.items()}
    torch.testing.assert_close(results["ours"], results["gloo"])
    goal = torch.empty_like(results["ours"])

    def finished(action: Action) -> Action:
        def run() -> None:
            action()
            if here.device.type == "cuda":
                torch.cuda.synchronize()

        return run

    actions: dict[str, Action] = {name: lambda x=x: x.to_global(sbp=sbp) for name, x in inputs.items()}  # type: ignore[misc]
    actions["copy"] = lambda: goal.copy_(results["gloo"])
    return {name: finished(action) for name, action in actions.items()}


def measure(size: int, source: str, target: str, gloo: World, rounds: int) -> dict[str, float]:
    """Median seconds of every candidate."""
    return medians(interleave(candidates(size, source, target, gloo), rounds, 3, around=together))


def describe(times: dict[tuple[int, str, str], dict[str, float]], name: str, where: str) -> str:
    """The table."""
    rows = [
        [f"{size >> 20} MiB {source} -> {target}", *(f"{found[who] * 1e6:.0f}" for who in ("ours", "gloo", "copy")),
         f"{found['gloo'] / found['ours']:.1f}"]
        for (size, source, target), found in times.items()
    ]  # fmt: skip
    return f"{where}, us.\n\n{table(['', name, 'gloo', 'copy', 'gloo / ours'], rows)}"


def judged(times: dict[tuple[int, str, str], dict[str, float]]) -> list[Comparison]:
    """The one boxing that has a target, if it was measured."""
    if JUDGED not in times:
        return []
    size, source, target = JUDGED
    found = times[JUDGED]
    return [side_by_side(f"{size >> 20} MiB {source} -> {target}", found["ours"], "gloo", found["gloo"], TARGET)]


def work(device: str, sizes: list[int], rounds: int) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    world = wb.init(device=device)
    gloo = gloo_world()
    times = {(size, *pair): measure(size, *pair, gloo, rounds) for size in sizes for pair in PAIRS}
    is_on_gpu = world.device.type == "cuda"
    where = f"{world.world_size} processes on {torch.cuda.get_device_name() if is_on_gpu else 'the CPU'}"
    body = describe(times, world.transport_name, where)
    if world.rank == 0 and is_on_gpu:
        publish("one-gpu", "Boxings between processes on one GPU", body, judged(times))
    elif world.rank == 0:
        print(body)
    dist.barrier()


def main() -> int:
    """Launch the processes, or work if this one has been launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="logical bytes")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("benchmarks.one_gpu needs a CUDA device; here is none. --device cpu runs the same program without.")
        return 0
    if is_launched():
        work(args.device, args.sizes, args.rounds)
        return 0
    return launch("benchmarks.one_gpu", NUM_PROCESSES, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
