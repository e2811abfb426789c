"""Timing for all benchmarks: candidates in turns, medians, processes.

Candidates take turns in short rounds, so that a machine that slows down or is shared slows all of them, and in an order
that changes from round to round: forwards and backwards, since a candidate leaves the caches warm or cold for the next.
What is reported is the median over the rounds, and ratios of such medians. Many short rounds are better than few long
ones: most of them are then not interrupted.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median

Action = Callable[[], object]


def interleave(
    candidates: Mapping[str, Action],
    rounds: int,
    calls: int,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    before: Callable[[Action], object] = lambda action: None,
) -> dict[str, list[float]]:
    """Seconds per call of every candidate in every round, after one round that does not count.

    ``around`` makes a context for each turn, e.g. one with a barrier at both ends; it is timed with the turn.
    ``before`` prepares a turn and is not timed.
    """
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    with _no_garbage_collection():
        for round_number in range(rounds + 1):
            for name in _order(names, round_number):
                before(candidates[name])
                time_s = _time_turn(candidates[name], calls, around)
                if round_number:
                    times[name].append(time_s / calls)
    return times


def _order(names: Sequence[str], round_number: int) -> list[str]:
    """Each comes first in turn, once forwards and once backwards; equal on all processes."""
    shift = round_number // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if round_number % 2 else order


def _time_turn(action: Action, calls: int, around: Callable[[], AbstractContextManager[object]]) -> float:
    started = time.perf_counter()
    with around():
        for _ in range(calls):
            action()
    return time.perf_counter() - started


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def together() -> Iterator[None]:
    """All processes start and end at the same time, so that each measures the slowest."""
    import torch.distributed as dist

    dist.barrier()
    yield
    dist.barrier()


def launch(module: str, num_processes: int, arguments: Sequence[str]) -> int:
    """Start ``python -m module`` on so many processes with torch's launcher, one thread each, and wait for them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, "-m", module, *arguments], env=environment, check=False).returncode


def is_launched() -> bool:
    """Whether this process is one of those that ``launch`` has started."""
    return "RANK" in os.environ


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each candidate."""
    return {name: median(values) for name, values in times.items()}


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of ratios, all of them positive."""
    return math.prod(ratios) ** (1 / len(ratios))
