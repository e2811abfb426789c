"""Timing for all benchmarks: candidates in turns, medians, processes.

Candidates take turns in short rounds, so that a machine that slows down or is shared slows all of them, and in an order
that changes from round to round: forwards and backwards, since a candidate leaves the caches warm or cold for the next.
What is reported is the median over the rounds, and ratios of such medians. Many short rounds are better than few long
ones: most of them are then not interrupted.

Processes that are started anew have other memory and other threads, and some launches of one program are faster than
others by more than what is compared. ``launch_often`` starts them several times; candidates are then compared within a
launch, and what is reported is the median over the launches.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

_HANDED_IN = "BENCHMARK_HANDED_IN"
_OPTIONS = {
    "launches": "how often the processes are started",
    "rounds": "turns of each candidate",
    "calls": "calls of a candidate in its turn",
}
_LAUNCHES = 5

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


def launch(module: str, num_processes: int, arguments: Sequence[str], hand_in_to: Path | None = None) -> int:
    """Start ``python -m module`` on so many processes with torch's launcher, one thread each, and wait for them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", _HANDED_IN: str(hand_in_to or "")}
    return subprocess.run([*launcher, "-m", module, *arguments], env=environment, check=False).returncode


def launch_often(module: str, num_processes: int, arguments: Sequence[str], num_launches: int) -> list[Any]:
    """``launch`` several times, one after the other; gives what each has handed in.

    Raises:
        RuntimeError: a launch has failed.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_launches):
            path = Path(folder) / f"{number}.json"
            code = launch(module, num_processes, arguments, path)
            if code:
                raise RuntimeError(
                    f"{module} on {num_processes} processes: launch {number} ended with exit code {code}"
                )
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def hand_in(found: Any) -> None:
    """What one of the processes of a launch has measured (plain numbers, words, lists, dictionaries)."""
    Path(os.environ[_HANDED_IN]).write_text(json.dumps(found), encoding="utf-8")


def launch_or_work(
    module: str, description: str | None, processes: Sequence[int], work: Callable[..., object], **options: int
) -> int:
    """``main`` of a benchmark: launch it on each of these numbers of processes, or work if it has been launched.

    ``options`` are those of the command line, with defaults, and the arguments of ``work``.
    """
    arguments = _arguments(description, options)
    if not is_launched():
        return max(launch(module, number, sys.argv[1:]) for number in processes)
    work(**arguments)
    return 0


def launch_often_or_work(
    module: str,
    description: str | None,
    processes: Sequence[int],
    work: Callable[..., object],
    report: Callable[..., object],
    **options: int,
) -> int:
    """``launch_or_work`` with several launches on each number of processes. ``report`` gets what they have handed in,
    the number, and the options.
    """
    arguments = _arguments(description, {"launches": _LAUNCHES} | options)
    num_launches = arguments.pop("launches")
    if is_launched():
        work(**arguments)
        return 0
    for number in processes:
        report(launch_often(module, number, sys.argv[1:], num_launches), number, **arguments)
    return 0


def _arguments(description: str | None, options: Mapping[str, int]) -> dict[str, int]:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=_OPTIONS.get(name))
    return vars(parser.parse_args())


def is_launched() -> bool:
    """Whether this process is one of those that ``launch`` has started."""
    return "RANK" in os.environ


def by_name(launches: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each candidate, launch by launch."""
    return {name: [launch[name] for launch in launches] for name in launches[0]}


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each candidate."""
    return {name: median(values) for name, values in times.items()}


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of ratios, all of them positive."""
    return math.prod(ratios) ** (1 / len(ratios))
