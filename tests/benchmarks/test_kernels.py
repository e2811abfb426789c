"""The benchmark of kernels on a GPU runs without one, from start to end; no time is judged here."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from benchmarks import kernels, reporting


class Event:
    """What stands for a moment of the device: it is done with its work at once."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def elapsed_time(self, other: Event) -> float:
        """In milliseconds."""
        return 1e3 * (other.at_s - self.at_s)


def test_the_actions_move_what_they_say() -> None:
    actions = kernels.moves(4 * 128 * 128, "cpu")
    copy = actions["plain copy"][0]
    assert isinstance(copy, partial)
    out, (source,) = copy.func.__self__, copy.args  # type: ignore[attr-defined]
    for name in ("plain copy", "pull of 4 slices", "unpack by columns"):
        out.zero_()
        actions[name][0]()
        assert out.equal(source) and actions[name][1] == 2 * source.nbytes
    assert torch.cat(actions["pack by columns"][0](), 1).equal(source)  # type: ignore[arg-type]


def test_both_losses_have_one_gradient() -> None:
    theirs, ours = (action() for action in kernels.losses(8, 100, "cpu").values())
    torch.testing.assert_close(ours, theirs)


def test_the_whole_benchmark_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_in = {}
    monkeypatch.setattr(kernels, "publish", lambda name, title, body, rows: handed_in.update({name: (body, rows)}))
    monkeypatch.setattr(kernels, "OTHER_WORK_BYTES", 2**10)
    monkeypatch.setattr(kernels, "SIZES_BYTES", (2**18,))
    for name in ("moves", "median_s"):
        monkeypatch.setattr(kernels, name, partial(getattr(kernels, name), device="cpu"))
    monkeypatch.setattr(kernels, "losses", partial(kernels.losses, 8, 100, "cpu"))
    replacements = {
        "Event": Event, "is_available": lambda: True, "get_device_name": lambda: "a stand-in",
        "synchronize": lambda: None, "reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: 10,
        "max_memory_allocated": lambda: 30,
    }  # fmt: skip
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr("sys.argv", ["benchmarks.kernels", "--rounds", "2"])
    assert kernels.main() == 0
    body, (slowest,) = handed_in["kernels-blocks"]
    assert all(
        name in body for name in ("pull of 4 slices", "pull and sum of 4", "pack by columns", "unpack by columns")
    )
    assert slowest.target == reporting.Target(0.85, at_least=True) and slowest.value > 0
    _, (time_taken, memory) = handed_in["kernels-loss"]
    assert time_taken.target == reporting.Target(1.5, at_least=True) and memory.value == 1.0
