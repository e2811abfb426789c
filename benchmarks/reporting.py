"""What a benchmark hands in: tables, comparisons with their targets, and result files that can be read back.

Every result file ends with one table of this form, whatever it tells above it:

    | comparison | ours | theirs | ratio | target | |

*Theirs* names whom it was measured beside, in turns, in the same run. A row without it is held against a figure of our
own choice. ``python -m benchmarks --table`` puts the tables of the newest result files together.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from workbench.units import format_seconds

RESULTS = Path(__file__).parent / "results"
HEADER = ("comparison", "ours", "theirs", "ratio", "target", "")


@dataclass(frozen=True)
class Target:
    """What a value should be: at most or at least ``limit``; without a unit, the value is a ratio."""

    limit: float
    at_least: bool = False
    unit: str = ""

    def __str__(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.limit:.4g} {self.unit}".rstrip()

    def is_met(self, value: float) -> bool:
        """Whether the value is on the right side."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True)
class Comparison:
    """One line of the table: a ratio, or a value in its target's unit.

    Attributes:
        ours: what was measured of ours, in words: ``"43.2 ms"``.
        theirs: whom it is compared with, and what that took: ``"DTensor 213 ms"``.
    """

    what: str
    value: float
    target: Target
    ours: str = ""
    theirs: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the value is on the right side of its target."""
        return self.target.is_met(self.value)

    def cells(self) -> list[str]:
        """In the order of ``HEADER``."""
        unit, verdict = self.target.unit, "met" if self.is_met else "NOT met"
        if unit == "s":
            measured = [format_seconds(self.value), "", ""]
        elif unit:
            measured = [f"{self._digits()} {unit}", "", ""]
        else:
            measured = [self.ours, self.theirs, self._digits()]
        return [self.what, *measured, str(self.target), verdict]

    def _digits(self) -> str:
        """Three digits of the value, or so many that what is written is on the same side of the target."""
        texts = (f"{self.value:#.{digits}g}".rstrip(".") for digits in range(3, 18))
        return next((text for text in texts if self.target.is_met(float(text)) == self.is_met), str(self.value))


def side_by_side(what: str, ours_s: float, name: str, theirs_s: float, target: Target) -> Comparison:
    """Of two times: how many times faster ours is, if that should be at least so much; else how many times as long."""
    ratio = theirs_s / ours_s if target.at_least else ours_s / theirs_s
    return Comparison(what, ratio, target, format_seconds(ours_s), f"{name} {format_seconds(theirs_s)}")


def ratios_side_by_side(ours_s: Sequence[float], theirs_s: Sequence[float]) -> list[float]:
    """How many times faster ours is, pair by pair."""
    return [theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True)]


def over_launches(
    what: str, ours_s: Sequence[float], name: str, theirs_s: Sequence[float], target: Target
) -> Comparison:
    """``side_by_side`` of several launches, each with both times: the median of their ratios."""
    words = format_seconds(median(ours_s)), f"{name} {format_seconds(median(theirs_s))}"
    pair = (ours_s, theirs_s) if target.at_least else (theirs_s, ours_s)
    return Comparison(what, median(ratios_side_by_side(*pair)), target, *words)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """A Markdown table with aligned columns: the first ones, of words, to the left, numbers to the right.

    >>> print(table(["", "ms"], [["*: data | zero=3", "5"]]))
    |                   | ms |
    |-------------------|---:|
    | *: data \\| zero=3 |  5 |
    """
    header, *rows = ([cell.replace("|", r"\|") for cell in row] for row in (header, *rows))
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return (
            "| "
            + " | ".join(cell.ljust(width) if i < num_left else cell.rjust(width) for i, (cell, width) in pairs)
            + " |"
        )

    rules = ["-" * (width + 2) if i < num_left else "-" * (width + 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(header), f"|{'|'.join(rules)}|", *(line(row) for row in rows)])


def publish(name: str, title: str, body: str, comparisons: Sequence[Comparison]) -> bool:
    """Print a result and keep it as ``results/<date>-<name>.md``; returns whether all targets are met.

    The processor's name is added where a result of another machine on the same day has that name already.
    """
    text = f"# {title}\n\n{today()}, {machine()}\n\n{body}\n\n{table(HEADER, [row.cells() for row in comparisons])}\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{today()}-{name}.md"
    hardware = machine().partition(";")[0]
    if path.exists() and hardware not in path.read_text(encoding="utf-8"):
        path = path.with_stem(f"{path.stem}-{processor_words(hardware)}")
    path.write_text(text, encoding="utf-8")
    return all(row.is_met for row in comparisons)


def today() -> str:
    """The date here, as result files are named."""
    return datetime.now().astimezone().date().isoformat()


def machine() -> str:
    """Processor, cores, memory and versions; no names or paths."""
    import psutil
    import torch

    memory_gb = psutil.virtual_memory().total / 1e9
    return (
        f"{_processor()}, {psutil.cpu_count()} cores, {memory_gb:.0f} GB memory, {platform.system()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def processor_words(hardware: str) -> str:
    """The processor of a machine, for a file's name.

    >>> processor_words("AMD EPYC-Milan Processor, 2 cores, 24 GB memory, Linux")
    'amd-epyc-milan'
    """
    words = re.sub(r"\(\w+\)|processor|cpu|@.*", " ", hardware.partition(",")[0].lower())
    return "-".join(re.findall(r"[a-z0-9]+", words))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
