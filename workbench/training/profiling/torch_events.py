"""What torch's profiler has seen on a rank, on the rank's own clock."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from workbench.core.intervals import Interval
from workbench.core.trace_events import Event, track_name
from workbench.tensors.hidden_from_modes import hidden_from_modes

_CLOCK = "workbench: the clock"
_NUM_CLOCKS = 5
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_WRAPPERS = ("autograd::engine::", "torch::autograd::")
_COMPILED = "## Call CompiledFxGraph"
_KEPT_ARGUMENTS = ("stream", "bytes", "grid", "block", "correlation", "device")
_FIRST_TRACK = 100


class TorchRecording:
    """Torch's profiler on this process, from ``start`` to ``stop``.

    Attributes:
        problem: why there are no events; empty if there are.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        # There is one cycle. Without acc_events, torch before 2.13 warns that a second one would clear the events.
        self._profile, self._times_s = profile(activities=activities, acc_events=True), list[float]()
        self.problem = ""

    def start(self) -> None:
        """Begin to record, in this thread."""
        if torch._C._autograd._profiler_enabled():
            self.problem = "torch's profiler was running already, so its events are not here"
            return
        with _quiet():
            self._profile.start()
        with hidden_from_modes():  # of a capture
            for _ in range(_NUM_CLOCKS):
                with record_function(_CLOCK):
                    self._times_s.append(time.perf_counter())

    def stop(self) -> None:
        """End the recording."""
        if not self.problem and not torch._C._autograd._profiler_enabled():
            self.problem = "another profiler of torch has ended this one, so its events are not here"
        if not self.problem:
            with _quiet():
                self._profile.stop()

    def events(self) -> list[Event]:
        """The events, in the trace event format, in microseconds of ``time.perf_counter``."""
        if self.problem:
            return []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "events.json"
            self._profile.export_chrome_trace(str(path))
            found = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        marks = (e for e in found if e["name"] == _CLOCK and e.get("cat") == "user_annotation")
        clocks = sorted(marks, key=lambda event: event["ts"])
        # Each time was taken inside its event: the shortest event knows it best.
        _, offset = min(
            (c["dur"], t * 1e6 - c["ts"] - c["dur"] / 2) for c, t in zip(clocks, self._times_s, strict=True)
        )
        kept = [event for event in found if event.get("ph") in "XsfM" and event["name"] != _CLOCK]
        return [
            {**event, "ts": event["ts"] + offset}
            for event in kept
            if event.get("cat") != "Trace" and type(event["pid"]) is int
        ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Kineto writes a line to the process's standard error when it starts and stops, whatever its log level is."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def computes(events: Sequence[Event]) -> list[Interval]:
    """When the device computes, in seconds: kernels, copies and fills on a GPU; else operators, without autograd's
    wrappers of Python functions, and compiled programs.
    """
    device = [event for event in events if event.get("cat") in _ON_DEVICE]
    work = [event for event in device if not _is_nccl(event)] if device else list(filter(_is_work, events))
    return list(map(_interval, work))


def nccl_kernels(events: Sequence[Event]) -> list[Interval]:
    """When kernels of NCCL run."""
    return [_interval(event) for event in events if event.get("cat") == "kernel" and _is_nccl(event)]


def on_tracks(events: Sequence[Event], rank: int) -> Iterator[Event]:
    """The events as those of a rank, each thread and each stream of a GPU on a track of its own."""
    tracks: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any], str] = {}
    for event in events:
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[place] = event["args"]["name"]
            continue
        track = tracks.setdefault(place, _FIRST_TRACK + len(tracks))
        arguments = {name: value for name, value in event.get("args", {}).items() if name in _KEPT_ARGUMENTS}
        moved = {name: value for name, value in event.items() if name != "args"} | {"pid": rank, "tid": track}
        moved |= {"args": arguments} if arguments else {}
        yield moved | ({"id": f"{rank}.{event['id']}"} if "id" in event else {})
    for place, track in tracks.items():
        yield from track_name(rank, track, names.get(place, f"thread {place[1]}"))


def _is_work(event: Event) -> bool:
    name = event["name"]
    if event.get("cat") != "cpu_op":
        return event.get("cat") == "user_annotation" and name.startswith(_COMPILED)
    return not name.startswith(_WRAPPERS) and not name.rstrip("0123456789").endswith("Backward")


def _is_nccl(event: Event) -> bool:
    return "nccl" in event["name"].lower()


def _interval(event: Event) -> Interval:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
