"""Timing, tables and result files for all benchmarks.

Candidates take turns in short rounds, in an order that changes from round to round, so that a machine that slows down
or is shared slows all of them; what is reported is the median over the rounds, and ratios of such medians. Many short
rounds are better than few long ones: most of them are then not interrupted.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parent / "results"
Action = Callable[[], object]


@dataclass(frozen=True)
class Target:
    """What a ratio should be: at most or at least ``limit``."""

    limit: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.limit:g}"

    def is_met(self, ratio: float) -> bool:
        """Whether the ratio is on the right side."""
        return ratio >= self.limit if self.at_least else ratio <= self.limit


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
            shift = round_number % len(names)
            for name in [*names[shift:], *names[:shift]]:
                before(candidates[name])
                time_s = _time_turn(candidates[name], calls, around)
                if round_number:
                    times[name].append(time_s / calls)
    return times


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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, the first to the left, numbers to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"

    rule = (
        "|" + "|".join("-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)) + "|"
    )
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def machine() -> str:
    """Processor, cores, memory and versions; no names or paths."""
    import psutil
    import torch

    memory_gb = psutil.virtual_memory().total / 1e9
    return (
        f"{_processor()}, {psutil.cpu_count()} cores, {memory_gb:.0f} GB memory, {platform.system()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def publish(name: str, title: str, body: str, ratio: float, target: Target) -> bool:
    """Print the result and keep it as ``results/<date>-<name>.md``; returns whether the target is met."""
    keep(name, title, f"{body}\n\nRatio {ratio:.2f}; target {target}: {_verdict(ratio, target)}.")
    return target.is_met(ratio)


def verdicts(ratios: Sequence[tuple[str, float, Target]]) -> str:
    """A table of several ratios against their targets."""
    rows = [[what, f"{ratio:.2f}", str(target), _verdict(ratio, target)] for what, ratio, target in ratios]
    return table(["", "ratio", "target", ""], rows)


def _verdict(ratio: float, target: Target) -> str:
    return "met" if target.is_met(ratio) else "NOT met"


def keep(name: str, title: str, body: str) -> None:
    """Print a result and keep it as ``results/<date>-<name>.md``."""
    day = datetime.now().astimezone().date().isoformat()
    text = f"# {title}\n\n{day}, {machine()}\n\n{body}\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{day}-{name}.md").write_text(text, encoding="utf-8")
