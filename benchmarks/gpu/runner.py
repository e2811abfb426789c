"""Runs a part in a process of its own that cannot take the others with it, and makes the table of all."""

from __future__ import annotations

import pickle
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.gpu.place import ROOT, Finding, Found
from benchmarks.reporting import table

LOGS = ROOT / "out" / "gpu"
_NUM_LINES, _WIDTH = 3, 160
_HEADER = ("part", "seconds", "what", "seen")


@dataclass(frozen=True)
class Outcome:
    """What a part has found, and why it found no more: the last lines of its error, empty if it has ended well."""

    name: str
    found: list[Found]
    error: str
    time_s: float
    needs_gpu: bool = False


def run(name: str, command: Sequence[str], limit_s: float) -> Outcome:
    """Run a command, with the name of a file for its findings behind it; kill it with all its children in the end.

    All that it prints is in ``LOGS`` afterwards.
    """
    started_s = time.monotonic()
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "found"
        with log.open("wb") as output:
            process = psutil.Popen([*command, str(into)], stdout=output, stderr=subprocess.STDOUT)
            why = ""
            try:
                code = process.wait(limit_s)
                why = f"ended by signal {-code}" if code < 0 else f"exit code {code}" if code else ""
            except psutil.TimeoutExpired:
                why = f"not done after {limit_s:g} s"
            finally:
                _kill(process)
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_NUM_LINES:]
        error = "; ".join([why, *(line.strip()[:_WIDTH] for line in last)]) if why else ""
        return Outcome(name, _read(into), error, time.monotonic() - started_s)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        for each in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    with suppress(psutil.NoSuchProcess):
        process.wait(10)


def _read(path: Path) -> list[Found]:
    found: list[Found] = []
    if path.exists():
        with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):  # the last one may be cut off
            while True:
                found.append(pickle.load(file))
    return found


def describe(outcomes: Sequence[Outcome]) -> str:
    """The table of all parts."""
    rows = []
    for outcome in outcomes:
        seen = [(found.what, found.seen if isinstance(found, Finding) else _in_words(found)) for found in outcome.found]
        if outcome.needs_gpu:
            seen = [("", "needs a GPU")]
        if outcome.error:
            seen.append(("FAILED", outcome.error))
        lines = seen or [("", "done")]
        heads = [(outcome.name, f"{outcome.time_s:.0f}"), *[("", "")] * (len(lines) - 1)]
        rows += [[cell.replace("|", "/") for cell in (*head, *line)] for head, line in zip(heads, lines, strict=True)]
    return table(_HEADER, rows, num_left=4)


def _in_words(found: Found) -> str:
    assert not isinstance(found, Finding)
    return " ".join(filter(None, found.cells()[1:]))
