"""What ``offload=`` takes off the GPU's memory, and what it costs in time: a GPT with AdamW on one rank.

Before its memory and its time count, a strategy with it has the losses of the one without it. The same functions run,
but some of torch's backwards add in another order each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import workbench as wb
from benchmarks.gpu.place import Finding, Found, Place
from benchmarks.harness import interleave, medians
from benchmarks.offload import SAVED, Training, held_by
from benchmarks.reporting import Comparison
from workbench.units import format_bytes, format_seconds

WIDE, LONG, SMALL = (1024, 8192, 256, 8), (256, 1024, 1024, 32), (32, 64, 64, 8)
"""Width, number of words, length and number of texts: for the optimizer's state, and for activations."""
PAIRS = {
    "optimizer's state": (WIDE, "*: data", "*: data | offload=optimizer"),
    "activations": (LONG, "*: data", "*: data | offload=activations"),
}


MOST_APART = 1e-4


def offload(place: Place) -> Iterator[Found]:
    """Memory, then times in turns.

    Raises:
        AssertionError: losses differ by more than rounding.
    """
    wb.init(device=place.device)
    for name, (size, plain, offloaded) in PAIRS.items():
        yield from compared(place, name, size if place.is_gpu else SMALL, plain, offloaded)


def compared(place: Place, name: str, size: Sequence[int], plain: str, offloaded: str) -> Iterator[Found]:
    """One strategy without and with it."""

    @contextmanager
    def until_done() -> Iterator[None]:
        place.wait()
        yield
        place.wait()

    before, after = (held_by(size, strategy) for strategy in (plain, offloaded))
    apart = max(abs(a / b - 1) for a, b in zip(after["losses"], before["losses"], strict=True))
    assert apart <= MOST_APART, f"{offloaded}: losses {after['losses']}, without it {before['losses']}"
    saved: float = before["peak"] - after["peak"]
    seen = f"peak {format_bytes(before['peak'])}, offloaded {format_bytes(after['offloaded'])}"
    if place.is_gpu:
        words = format_bytes(saved), f"offloaded {format_bytes(after['offloaded'])}"
        yield Comparison(f"{name}, bytes saved", saved / after["offloaded"], SAVED, *words)
    trainings: dict[str, Any] = {strategy: Training(size, strategy) for strategy in (plain, offloaded)}
    time_s = medians(interleave(trainings, 8 if place.is_gpu else 1, 1, around=until_done))
    times = f"step {format_seconds(time_s[plain])}, with it {format_seconds(time_s[offloaded])}"
    yield Finding(name, f"{seen}; {times}; losses differ by {apart:.1e}")
