"""All result files of one machine as one table: the newest of each, the rows where we lose included."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reporting import HEADER, processor_words, table

TITLE = "All comparisons"
MET, NOT_MET = "met", "NOT met"
_FILE = re.compile(r"(\d{4}-\d{2}-\d{2})-(.+)\.md")


@dataclass(frozen=True)
class Result:
    """What a result file says.

    Attributes:
        machine: processor, cores, memory and versions.
        rows: cells in the order of ``HEADER``.
    """

    name: str
    date: str
    title: str
    machine: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def hardware(self) -> str:
        """The machine without its versions."""
        return self.machine.partition(";")[0]


def read_result(path: Path) -> Result | None:
    """A result file; None for what is not one, such as the table of all."""
    named = _FILE.fullmatch(path.name)
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [cells for cells in map(cells_of, lines) if len(cells) == len(HEADER)]
    heads = [number for number, cells in enumerate(rows) if cells == HEADER]
    title = lines[0].removeprefix("# ")
    if named is None or title == TITLE or not heads:
        return None
    machine = lines[2].partition(", ")[2]
    name = named[2].removesuffix(f"-{processor_words(machine)}")
    return Result(name, named[1], title, machine, tuple(rows[heads[-1] + 2 :]))


def cells_of(line: str) -> tuple[str, ...]:
    """Of one line of a table; none where it is none."""
    return tuple(cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1])


def newest(folder: Path, hardware: str) -> list[Result]:
    """Of every benchmark, the newest result on this machine, by name."""
    found: dict[str, Result] = {}
    for path in sorted(folder.glob("*.md")):
        result = read_result(path)
        if result is not None and result.hardware == hardware:
            found[result.name] = result
    return [found[name] for name in sorted(found)]


def one_table(results: Sequence[Result]) -> str:
    """Every row of every result."""
    return _titled([(result.title, *cells) for result in results for cells in result.rows])


def _titled(rows: Sequence[tuple[str, ...]]) -> str:
    """The table; a title stands on the first of its rows."""
    before = ["", *(row[0] for row in rows)]
    pairs = zip(rows, before, strict=False)
    return table(("", *HEADER), [(title * (title != last), *cells) for (title, *cells), last in pairs], num_left=2)


def score(results: Sequence[Result]) -> str:
    """How many targets are met, where and when."""
    verdicts = [cells[-1] for result in results for cells in result.rows]
    dates = sorted({result.date for result in results})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machine = max(results, key=lambda result: result.date).machine
    return f"{verdicts.count(MET)} of {len(verdicts)} targets met. {when}, {machine}."


def file_name(result: Result) -> str:
    """Of the table of all on this machine: ``2026-11-22-intel-xeon-2-cores.md``."""
    cores = result.hardware.split(", ")[1].replace(" ", "-")
    return f"{result.date}-{processor_words(result.hardware)}-{cores}.md"
