"""What a first page says of the table of all comparisons: how each went beside other software, and what was missed.

Every row that misses is counted; the rows themselves, losses included, are in the table (``one_table``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmarks.one_table import NOT_MET, cells_of
from benchmarks.reporting import HEADER, table

IN_SHORT = {
    "Data parallel and ZeRO": ("Data parallel", "ZeRO"),
    "Tensor parallel": ("Tensor parallel",),
    "Pipelines": ("Pipelines",),
    "Compiled steps": ("Compiled",),
    "Attention on a split sequence": ("Attention on a split sequence",),
    "Boxings": ("Boxings",),
}
"""Lines of the first page: what the titles of their comparisons begin with, whatever the number of processes."""
_SCALES = {"ms": 1e-3, "us": 1e-6}
"""Times have the unit that fits them."""


class Row(NamedTuple):
    """One row of the table of all comparisons, in words."""

    title: str
    what: str
    ours: str
    theirs: str
    ratio: str
    target: str
    verdict: str

    @property
    def is_beside_software(self) -> bool:
        """Whether it names somebody else's program; ``limit 2.4 ms`` is what the machine itself takes."""
        return bool(self.theirs) and not self.theirs.startswith("limit ")

    @property
    def times_as_good(self) -> float:
        """How many times as fast as theirs ours is, or how many times as small."""
        ratio = float(self.ratio)
        return ratio if self.target.startswith("at least") else 1 / ratio

    @property
    def value(self) -> float:
        """What is held against the target: the ratio, or a figure with a unit; times in seconds."""
        number, _, unit = (self.ratio or self.ours).partition(" ")
        return float(number) * _SCALES.get(unit, 1.0)

    @property
    def measured(self) -> str:
        """The same in words."""
        return self.ratio or self.ours


def read_rows(text: str) -> list[Row]:
    """Of the table in a text, every row with its title, which stands on the first row of several."""
    found, title = [], ""
    for cells in map(cells_of, text.splitlines()):
        if len(cells) == 1 + len(HEADER):
            title = cells[0] or title
            found.append(Row(title, *cells[1:]))
    return found[2:]


def beside_software(rows: Iterable[Row]) -> str:
    """One line per comparison with other programs: its slowest and its fastest row, and the targets met."""
    return _extremes(((row.title, row) for row in rows), _against, num_left=3)


def in_short(rows: Iterable[Row]) -> str:
    """The lines of ``IN_SHORT``, with ratios only."""
    kept = list(rows)
    lines = ((line, row) for line in IN_SHORT for row in kept if _line_of(row) == line)
    return _extremes(lines, _times, num_left=1)


def alone(rows: Iterable[Row]) -> str:
    """A sentence on the rows that these leave out."""
    others = [row for row in rows if not row.is_beside_software or not _line_of(row)]
    met = sum(row.verdict != NOT_MET for row in others)
    return f"{len(others)} more targets are of other comparisons, a formula, a limit or a prediction; {met} are met."


def _line_of(row: Row) -> str:
    """Its line of ``IN_SHORT``; empty without one."""
    return next((line for line, beginnings in IN_SHORT.items() if row.title.startswith(beginnings)), "")


def _extremes(rows: Iterable[tuple[str, Row]], say: Callable[[Row], str], num_left: int) -> str:
    groups = defaultdict(list)
    for line, row in rows:
        if row.is_beside_software:
            groups[line].append(row)
    lines = []
    for title, group in groups.items():
        ordered = sorted(group, key=lambda row: row.times_as_good)
        fastest = say(ordered[-1]) if len(ordered) > 1 else ""
        met = sum(row.verdict != NOT_MET for row in ordered)
        lines.append([title, say(ordered[0]), fastest, f"{met} of {len(ordered)}"])
    return table(("", "slowest", "fastest", "targets met"), lines, num_left=num_left)


def misses(rows: Iterable[Row]) -> str:
    """Every target that was missed: in how many rows of a comparison, by how much, and the row that is furthest off."""
    groups = defaultdict(list)
    for row in rows:
        if row.verdict == NOT_MET:
            groups[row.title, row.target].append(row)
    lines, last = [], ""
    for (title, target), group in groups.items():
        ordered = sorted(group, key=lambda row: row.value, reverse=target.startswith("at least"))
        values = " to ".join(dict.fromkeys([ordered[0].measured, ordered[-1].measured]))
        lines.append([title * (title != last), ordered[-1].what, str(len(group)), values, target])
        last = title
    return table(("", "furthest off", "rows", "measured", "target"), lines, num_left=2)


def _against(row: Row) -> str:
    """``2.1×: 8 blocks, 155 ms, DTensor 326 ms``."""
    return f"{_times(row)}: {row.what}, {row.ours}, {row.theirs}"


def _times(row: Row) -> str:
    """``2.1×``: no more digits than the inverse of a rounded ratio has."""
    return f"{round(row.times_as_good, 2):.3g}×"
