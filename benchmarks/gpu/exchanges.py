"""Boxings between processes on ONE device: over CUDA IPC, over gloo (through the host), and a plain copy on the device.

NCCL refuses two ranks on one GPU, so gloo is what there is otherwise. Every boxing is compared with gloo's result
before it is timed, and a turn ends when the device has done its work. The plain copy is of the bytes of the rank's new
shard. CPU ranks use what they use otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import workbench as wb
from benchmarks.gpu.place import Finding, Found, Place
from benchmarks.harness import Action, hand_in, interleave, is_launched, launch_often, medians, together
from benchmarks.reporting import Target, side_by_side
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors.global_tensor import spec_of, wrap
from workbench.tensors.world import World, current
from workbench.transport.network.gloo import GlooTransport
from workbench.transport.network.hang_detector import HangDetector
from workbench.transport.rendezvous import join_rendezvous
from workbench.units import format_bytes, format_seconds

NUM_PROCESSES, ROUNDS = 4, 4
SIZES = (2**20, 16 * 2**20, 256 * 2**20)
PAIRS = [("S(0)", "S(1)"), ("S(0)", "B"), ("P", "B"), ("P", "S(0)")]
JUDGED, TARGET = (SIZES[-1], "S(0)", "S(1)"), Target(10, at_least=True)


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
            Place(str(here.device)).wait()

        return run

    actions: dict[str, Action] = {name: lambda x=x: x.to_global(sbp=sbp) for name, x in inputs.items()}  # type: ignore[misc]
    actions["copy"] = lambda: goal.copy_(results["gloo"])
    return {name: finished(action) for name, action in actions.items()}


def measure(size: int, source: str, target: str, gloo: World, rounds: int) -> dict[str, float]:
    """Median seconds of every candidate."""
    return medians(interleave(candidates(size, source, target, gloo), rounds, 3, around=together))


def in_words(size: int, source: str, target: str, times_s: dict[str, float]) -> Finding:
    """One boxing's times."""
    seen = ", ".join(f"{name} {format_seconds(time_s)}" for name, time_s in times_s.items())
    return Finding(f"{format_bytes(size)} {source} -> {target}", seen)


def between_processes(place: Place) -> Iterator[Found]:
    """Start the ranks on the device and find what each boxing takes."""
    num_processes = NUM_PROCESSES if place.is_gpu else 2
    [(name, rows)] = launch_often("benchmarks.gpu.exchanges", num_processes, [place.device], 1)
    yield Finding("transport", f"{name}, {num_processes} processes on {place.name}")
    for size, source, target, times_s in rows:
        yield in_words(size, source, target, times_s)
        if (size, source, target) == JUDGED:
            yield side_by_side(f"256 MiB {source} -> {target}", times_s["ours"], "gloo", times_s["gloo"], TARGET)


def work(place: Place) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    world = wb.init(device=place.device)
    gloo, rounds = gloo_world(), ROUNDS if place.is_gpu else 1
    sizes = SIZES if place.is_gpu else (2**16,)
    rows = [(size, *pair, measure(size, *pair, gloo, rounds)) for size in sizes for pair in PAIRS]
    if world.rank == 0:
        hand_in([world.transport_name, rows])
    dist.barrier()


if __name__ == "__main__":
    assert is_launched()
    work(Place(sys.argv[1]))
