"""What a session costs: the round trip of an empty cell, its start, a flood of output, and the end of a cell.

An empty ``%%global`` cell stands beside ipyparallel's ``view.execute`` and ``%%px`` on the same engines, the start of a
session beside ipyparallel's own cluster whose engines then import torch. Where nbdistributed is installed, its empty
cell is measured too, in namespaces of its own.

    python -m benchmarks.session
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import subprocess
import sys
import time
from statistics import median

import ipyparallel as ipp
import psutil
from IPython.core.interactiveshell import InteractiveShell

import workbench as wb
from benchmarks import nbdistributed_cells
from benchmarks.harness import interleave, medians
from benchmarks.reporting import Comparison, Target, publish, side_by_side, table
from workbench.errors import CellError

CELL = "pass"
ROUND_TRIP, FASTER = Target(1.3), Target(1.0, at_least=True)
START = Target(1.5, unit="s")
GROWTH = Target(50, unit="MB")
STOP = Target(2.0, unit="s")
NUM_LINES = 100_000


def make_shell() -> InteractiveShell:
    """A shell with the workbench's magics, as a notebook has them."""
    shell = InteractiveShell.instance()
    if shell.find_line_magic("workbench") is None:
        shell.run_line_magic("load_ext", "workbench")
    return shell


def measure_round_trips(num_engines: int, rounds: int, calls: int) -> dict[str, float]:
    """Median seconds of an empty cell by each way, on the engines of one session."""
    shell = make_shell()
    with wb.Session(engines=num_engines) as session:
        # There is no public way to these engines but the session's; its client is a plain ipyparallel client.
        view = session._live().client[:]
        view.block = True
        view.activate()  # registers %%px
        return medians(
            interleave(
                {
                    "view.execute(silent=False)": lambda: view.execute(CELL, silent=False).get(),
                    "%%px": lambda: shell.run_cell_magic("px", "", CELL),
                    "%%global": lambda: shell.run_cell_magic("global", "", CELL),
                },
                rounds,
                calls,
            )
        )


def beside_nbdistributed(ours_s: float, num_workers: int, num_cells: int) -> tuple[str, list[Comparison]]:
    """A sentence on the round trip of its empty cell beside ours, or on why there is none."""
    why_not = nbdistributed_cells.why_not()
    if why_not:
        return f"nbdistributed was not measured: {why_not}.", []
    try:
        time_s = nbdistributed_cells.measure(num_workers, num_cells)
    except subprocess.SubprocessError as error:
        return f"nbdistributed was not measured: {error}.", []
    text = (
        f"nbdistributed's %%distributed on {num_workers} workers, in namespaces of its own: {time_s * 1e3:.0f} ms, "
        f"median of {num_cells} cells (it looks for results every 100 ms)."
    )
    return text, [side_by_side(f"empty cell, {num_workers} engines", ours_s, "nbdistributed", time_s, FASTER)]


def start_ours(num_engines: int) -> float:
    """Seconds until a session is ready."""
    started = time.perf_counter()
    with wb.Session(engines=num_engines):
        return time.perf_counter() - started


def start_bare(num_engines: int) -> float:
    """Seconds until ipyparallel's own engines are there and have imported torch."""
    started = time.perf_counter()
    with ipp.Cluster(n=num_engines, log_level=50) as client:
        client.wait_for_engines(num_engines)
        client[:].execute("import torch").get()
        return time.perf_counter() - started


def measure_flood(num_engines: int, num_lines: int) -> tuple[float, float, int]:
    """Seconds, growth of this process in MB, and lines found on disk, when every rank prints so many lines."""
    shell = make_shell()
    with wb.Session(engines=num_engines) as session, open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere):
            shell.run_cell_magic("global", "", "for i in range(1000): print(i)")
        gc.collect()
        before, started = psutil.Process().memory_info().rss, time.perf_counter()
        with contextlib.redirect_stdout(nowhere):
            shell.run_cell_magic("global", "", f"for i in range({num_lines}): print('token', i, wb.rank())")
        took = time.perf_counter() - started
        gc.collect()
        growth = (psutil.Process().memory_info().rss - before) / 1e6
        log = session.logs.last()
        assert log is not None
        lines = 0
        for path in log.values():
            with path.open() as file:
                lines += sum(1 for _ in file)
        return took, growth, lines


STOPPED_CELLS = {
    "rank 1 fails, rank 0 sleeps": "if wb.rank() == 1: raise KeyError('lost')\ntime.sleep(60)",
    "rank 1 fails, rank 0 waits in a barrier": "if wb.rank() == 1: raise KeyError('lost')\nwb.barrier()",
    "a time limit of 0.3 s, ranks sleep": "time.sleep(60)",
    "a time limit of 0.3 s, rank 1 is stuck in C": (
        "if wb.rank() == 1: hashlib.pbkdf2_hmac('sha256', b'x', b'y', 200_000_000)"
    ),
}
"""Cells that end because they must. A rank that is stuck in C is killed and started again."""


def measure_stops(rounds: int) -> dict[str, float]:
    """Median seconds from a cell's fault, or its time limit, to the error in the notebook."""
    seconds: dict[str, list[float]] = {name: [] for name in STOPPED_CELLS}
    with wb.Session(engines=2) as session:
        for _ in range(rounds):
            for name, code in STOPPED_CELLS.items():
                session.run("import time, hashlib; wb.barrier()")
                limit_s = 0.3 if "limit" in name else None
                started = time.perf_counter()
                with contextlib.suppress(CellError):
                    session.run(code, timeout=limit_s)
                seconds[name].append(time.perf_counter() - started - (limit_s or 0.0))
    return {name: median(each) for name, each in seconds.items()}


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=2, help="cells per round")
    parser.add_argument("--starts", type=int, default=3, help="starts of each")
    parser.add_argument("--stops", type=int, default=5, help="cells of each kind that must end")
    parser.add_argument("--lines", type=int, default=NUM_LINES, help="lines that every rank prints")
    args = parser.parse_args()
    parts, judged, cell_s = [], list[Comparison](), dict[int, float]()
    for num_engines in (2, 8):
        time_s = measure_round_trips(num_engines, args.rounds, args.calls)
        rows = [[name, f"{value * 1e3:.2f}"] for name, value in time_s.items()]
        parts.append(f"An empty cell on {num_engines} engines, medians of {args.rounds} rounds of {args.calls} cells:")
        parts.append(table(["", "round trip, ms"], rows))
        theirs, cell_s[num_engines] = "view.execute(silent=False)", time_s["%%global"]
        judged.append(
            side_by_side(
                f"empty cell, {num_engines} engines", cell_s[num_engines], "ipyparallel", time_s[theirs], ROUND_TRIP
            )
        )
    text, beside = beside_nbdistributed(cell_s[2], 2, args.rounds)
    parts.append(text)
    judged += beside
    starts = [(start_ours(2), start_bare(2)) for _ in range(args.starts)]
    ours, bare = (median(each) for each in zip(*starts, strict=True))
    parts.append(f"Start of 2 engines, medians of {args.starts}:")
    rows = [["ipyparallel's cluster, then import torch", f"{bare:.2f}"], ["Session", f"{ours:.2f}"]]
    parts.append(table(["", "s"], rows))
    judged.append(Comparison("start, beyond ipyparallel's cluster and torch", ours - bare, START))
    took, growth, lines = measure_flood(4, args.lines)
    parts.append(
        f"4 ranks print {args.lines} lines each: {took:.1f} s, the notebook's process grows by {growth:.1f} MB, "
        f"{lines} of {4 * args.lines} lines are on disk."
    )
    judged.append(Comparison("growth of the notebook's process in a flood", growth, GROWTH))
    stops = measure_stops(args.stops)
    parts.append(f"A cell that must end, until its error is in the notebook, medians of {args.stops}:")
    parts.append(table(["", "s"], [[name, f"{value:.2f}"] for name, value in stops.items()]))
    judged += [Comparison(f"stop: {name}", value, STOP) for name, value in stops.items()]
    publish("session", "Sessions", "\n\n".join(parts), judged)
    return 0


if __name__ == "__main__":
    sys.exit(main())
