"""A training step on one device: captured and as written against plain torch, its waits, and a profiler's trace."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

import workbench as wb
from benchmarks.capture import TARGET, Step, candidates, largest_difference, make_model, step_of
from benchmarks.gpu.place import ROOT, Finding, Found, Place
from benchmarks.harness import interleave, medians
from benchmarks.reporting import Target, side_by_side
from workbench.tensors.world import current
from workbench.units import format_seconds

MODELS: dict[str, tuple[Any, ...]] = {
    "small products": (12, 64, 8, 32),
    "large products": (12, 1024, 8, 512),
    "large products, bf16": (12, 1024, 8, 512, torch.bfloat16),
}
SMALL: dict[str, tuple[Any, ...]] = {"one block": (1, 16, 2, 4)}
"""Blocks, width, batch, length and dtype."""
COMPILED = (4, 256, 8, 128)
OUR_BACKENDS = {
    "inductor": "inductor",
    "CUDA graphs": "cudagraphs",
    "inductor, CUDA graphs": "inductor+cudagraphs",
}
GRAPHS_TARGET = Target(0.8)
STRATEGIES = {
    "data": "*: data",
    "model": "*: model",
    "zero 3": "*: data | zero=3",
    "4 micro-batches": "*: data | mb=4",
    "bf16": "*: data | bf16",
    "recompute": "*: data | recompute",
    "recompute=attention": "*: data | recompute=attention",
    "offload": "*: data | offload=optimizer+activations",
}
TRACE = ROOT / "out" / "gpu-trace.json"
_WARM_UP, _TRACED = 4, 5


def times(place: Place) -> Iterator[Found]:
    """Each way to make a step, in turns."""
    wb.init(device=place.device)
    for name, sizes in (MODELS if place.is_gpu else SMALL).items():
        ways = candidates(current(), *sizes)
        if place.is_gpu:
            ways["CUDA graphs"] = _captured(place, sizes, "cudagraphs")
        time_s, _ = _in_turns(place, ways)
        plain_s = time_s["local torch"]
        yield side_by_side(f"captured step, {name}", time_s["captured"], "plain torch", plain_s, TARGET)
        if place.is_gpu:
            target = TARGET if name == "large products" else GRAPHS_TARGET  # which keep the GPU busy anyway
            yield side_by_side(f"CUDA graphs, {name}", time_s["CUDA graphs"], "plain torch", plain_s, target)
        written_s = time_s["as written"]
        yield Finding(
            f"step as written, {name}", f"{format_seconds(written_s)}, {written_s / plain_s:.2f} times as long"
        )
        yield Finding(f"largest difference of weights, {name}", f"{largest_difference(ways):.1e}")


def compiled(place: Place) -> Iterator[Found]:
    """Compiled steps against plain torch compiled, without and with CUDA graphs."""
    wb.init(device=place.device)
    sizes = COMPILED if place.is_gpu else SMALL["one block"]
    ways = {"local torch": candidates(current(), *sizes)["local torch"]}
    for name, mode in (("torch.compile", None), ("torch.compile, reduce-overhead", "reduce-overhead")):
        if place.is_gpu:
            ways[name] = _compiled_by_torch(place, sizes, mode)
    for name, backend in OUR_BACKENDS.items():
        if place.is_gpu or backend == "inductor":
            ways[name] = _captured(place, sizes, backend)
    time_s, first_s = _in_turns(place, ways)
    for name in ways:
        yield Finding(name, f"{format_seconds(time_s[name])}, first {_WARM_UP} steps {first_s[name]:.1f} s")
    if place.is_gpu:
        theirs = "torch.compile"
        yield side_by_side("inductor", time_s["inductor"], theirs, time_s[theirs], TARGET)
        theirs = "torch.compile, reduce-overhead"
        for name in ("CUDA graphs", "inductor, CUDA graphs"):
            yield side_by_side(name, time_s[name], theirs, time_s[theirs], TARGET)
    yield Finding("largest difference of weights", f"{largest_difference(ways):.1e}")


def _captured(place: Place, sizes: Sequence[Any], backend: str) -> tuple[nn.Module, Step]:
    """A captured step of the parallelized model on the same batch as the candidates'."""
    model, batch = _model_and_batch(place, sizes)
    model = wb.parallelize(model, "*: data")
    return model, partial(wb.capture(step_of(model), backend=backend), batch)


def _compiled_by_torch(place: Place, sizes: Sequence[Any], mode: str | None) -> tuple[nn.Module, Step]:
    model, batch = _model_and_batch(place, sizes)
    step = step_of(model)
    model.compile(mode=mode)
    return model, partial(step, batch)


def _model_and_batch(place: Place, sizes: Sequence[Any]) -> tuple[nn.Module, torch.Tensor]:
    num_blocks, width, rows, length, *dtype = sizes
    batch = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(1))
    return make_model(num_blocks, width).to(place.device, *dtype), batch.to(place.device, *dtype)


def _in_turns(place: Place, ways: dict[str, tuple[nn.Module, Step]]) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of a step of each way, and seconds of the steps before these."""

    @contextmanager
    def until_done() -> Iterator[None]:
        place.wait()
        yield
        place.wait()

    first_s = {}
    for way, (_, step) in ways.items():
        start = time.perf_counter()
        for _ in range(_WARM_UP):
            step()
        place.wait()
        first_s[way] = time.perf_counter() - start
    rounds, calls = (8, 5) if place.is_gpu else (1, 1)
    steps = {way: step for way, (_, step) in ways.items()}
    return medians(interleave(steps, rounds, calls, around=until_done)), first_s


def waits(place: Place) -> Iterator[Found]:
    """How often a step waits for the GPU, by torch's own count: as written, and replayed."""
    wb.init(device=place.device)
    batch = torch.randn(8, 32, 64)
    for name, strategy in STRATEGIES.items():
        step = step_of(wb.parallelize(make_model(2, 64), strategy))
        yield Finding(f"waits in a step, {name}", _waits_of(partial(step, batch)))
    batch = batch.to(place.device)
    for name, backend in {"captured": None, **OUR_BACKENDS}.items():
        step = wb.capture(step_of(wb.parallelize(make_model(2, 64), "*: data")), backend=backend)
        yield Finding(f"waits in a step, {name}", _waits_of(partial(step, batch)))


def _waits_of(step: Step) -> str:
    for _ in range(_WARM_UP + 2):
        step()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waited = [line for warning in said if "prototype feature" not in (line := str(warning.message).splitlines()[0])]
    return f"{len(waited)} {'; '.join(sorted(set(waited)))}".strip()


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
        on_device = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
        kernels = [event for event in on_device if not event.is_user_annotation]
        busy_s = sum(event.self_device_time_total for event in kernels) / 1e6 / _TRACED
        seen = f"{len(kernels) / _TRACED:.0f} kernels in a step, {format_seconds(busy_s)} of work; "
        yield Finding(f"trace, {way}", f"{seen if place.is_gpu else ''}{path.relative_to(ROOT)}")
