"""A training step on one device: captured and as written against plain torch, its waits, and a profiler's trace."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import workbench as wb
from benchmarks.capture import TARGET, candidates, largest_difference, make_model, step_of
from benchmarks.gpu.place import ROOT, Finding, Found, Place
from benchmarks.harness import interleave, medians
from benchmarks.reporting import side_by_side
from workbench.tensors.world import current
from workbench.units import format_seconds

MODELS = {"small products": (12, 64, 8, 32), "large products": (12, 1024, 8, 512)}
SMALL = {"one block": (1, 16, 2, 4)}
"""Blocks, width, batch and length."""
STRATEGIES = {"data": "*: data", "model": "*: model", "zero 3": "*: data | zero=3", "4 micro-batches": "*: data | mb=4"}
TRACE = ROOT / "out" / "gpu-trace.json"
_WARM_UP, _TRACED = 4, 5


def times(place: Place) -> Iterator[Found]:
    """Each way to make a step, in turns."""
    wb.init(device=place.device)

    @contextmanager
    def until_done() -> Iterator[None]:
        place.wait()
        yield
        place.wait()

    for name, sizes in (MODELS if place.is_gpu else SMALL).items():
        ways = candidates(current(), *sizes)
        steps = {way: step for way, (_, step) in ways.items()}
        for step in steps.values():
            for _ in range(_WARM_UP):
                step()
        rounds, calls = (8, 5) if place.is_gpu else (1, 1)
        time_s = medians(interleave(steps, rounds, calls, around=until_done))
        plain_s = time_s["local torch"]
        yield side_by_side(f"captured step, {name}", time_s["captured"], "plain torch", plain_s, TARGET)
        written_s = time_s["as written"]
        yield Finding(
            f"step as written, {name}", f"{format_seconds(written_s)}, {written_s / plain_s:.2f} times as long"
        )
        yield Finding(f"largest difference of weights, {name}", f"{largest_difference(ways):.1e}")


def waits(place: Place) -> Iterator[Found]:
    """How often a step waits for the GPU, by torch's own count."""
    wb.init(device=place.device)
    batch = torch.randn(8, 32, 64)
    for name, strategy in STRATEGIES.items():
        model = wb.parallelize(make_model(2, 64), strategy)
        step = step_of(model)
        for _ in range(_WARM_UP):
            step(batch)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step(batch)
            torch.cuda.set_sync_debug_mode("default")
        lines = sorted({str(warning.message).splitlines()[0] for warning in said})
        yield Finding(f"waits in a step, {name}", f"{len(said)} {'; '.join(lines)}".strip())


def trace(place: Place) -> Iterator[Found]:
    """A trace of some steps, for Perfetto or chrome://tracing."""
    wb.init(device=place.device)
    sizes = MODELS["small products"] if place.is_gpu else SMALL["one block"]
    ways = candidates(current(), *sizes)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if place.is_gpu else []
    for way, (_, step) in ways.items():
        for _ in range(_WARM_UP):
            step()
        place.wait()
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(_TRACED):
                step()
            place.wait()
        path = TRACE.with_stem(f"{TRACE.stem}-{way.replace(' ', '-')}")
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
        kernels = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
        busy_s = sum(event.self_device_time_total for event in kernels) / 1e6 / _TRACED
        seen = f"{len(kernels) / _TRACED:.0f} kernels in a step, {format_seconds(busy_s)} of work; "
        yield Finding(f"trace, {way}", f"{seen if place.is_gpu else ''}{path.relative_to(ROOT)}")
