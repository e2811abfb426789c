"""Draws a global tensor that is the last line of a cell: its numbers, and a picture of each rank's shard.

A pure function: layout and numbers -> HTML. The HTML has no scripts, so a saved notebook shows it. All ranks make equal
HTML, so it appears once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from workbench.core.layout import Layout, Region
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, Partial, Split
from workbench.session.on_engine.tensor_table import matrix_of, shown, written
from workbench.theme import CODE_FONT, UI_FONT, style_sheet
from workbench.units import format_bytes, format_ranks

MAX_RANKS = 16
"""With more ranks, only the first and the last ones along an axis are drawn."""
_CLASS = "wb-tensor"
_OUTLINE = (116.0, 58.0)
_THINNEST = 1.5
_SHADES = 2
_HUES = 4

_UI = f"var(--jp-ui-font-family, {UI_FONT})"
_CODE = f"12px/18px var(--jp-code-font-family, {CODE_FONT})"
_STYLE = f"""
.{_CLASS} {{ font: 12px/18px {_UI}; color: var(--wb-ink); overflow-x: auto; font-variant-numeric: tabular-nums; }}
.{_CLASS} .head {{ font: {_CODE}; margin-bottom: 6px; }}
.{_CLASS} .head b {{ font-weight: 700; margin-right: 12px; }}
.{_CLASS} .muted {{ color: var(--wb-muted); font-family: {_UI}; }}
.{_CLASS} .sides {{ display: flex; gap: 40px; align-items: flex-start; flex-wrap: wrap; }}
.{_CLASS} table.numbers {{ border-collapse: collapse; margin: 0; font: {_CODE}; }}
.{_CLASS} table.numbers :is(td, th) {{ padding: 0 6px; border: 0; text-align: right; white-space: pre;
  color: var(--wb-ink); }}
.{_CLASS} table.numbers :is(td, th, tr) {{ background: none !important; font-weight: 400; }}
.{_CLASS} table.numbers tr th {{ color: var(--wb-muted); }}
.{_CLASS} table.numbers .above {{ border-top: 1px solid var(--wb-ink); }}
.{_CLASS} table.numbers .left {{ border-left: 1px solid var(--wb-ink); }}
.{_CLASS} table.numbers .who {{ text-align: left; font-family: {_UI}; border-left: 5px solid; }}
.{_CLASS} .cards {{ display: grid; gap: 8px 6px; align-items: center; justify-items: center; }}
.{_CLASS} .card {{ border: 1px solid var(--wb-line); border-radius: 3px; padding: 4px 8px 6px; }}
.{_CLASS} .card .top {{ display: flex; gap: 8px; justify-content: space-between; }}
.{_CLASS} .card b::before {{ content: "\\25a0"; margin-right: 5px; }}
.{_CLASS} .card b span {{ color: var(--wb-ink); }}
.{_CLASS} .card .row {{ display: flex; gap: 8px; }}
.{_CLASS} .card svg {{ display: block; }}
"""


@dataclass(frozen=True)
class Subject:
    """The tensor to draw: its sizes, its layout, and the dims that run downwards and across.

    All ranks have the colour ``hue``. Without it, a rank's row chooses its hue and its column its shade.
    """

    shape: tuple[int, ...]
    layout: Layout
    dims: tuple[int | None, int | None]
    itemsize: int = 4
    hue: int | None = None

    @classmethod
    def of(cls, shape: tuple[int, ...], layout: Layout, itemsize: int = 4, hue: int | None = None) -> Subject:
        layout = layout.normalized(shape)
        return cls(shape, layout, drawn_dims(shape, layout), itemsize, hue)

    def size(self, dim: int | None) -> int:
        return self.shape[dim] if dim is not None else 1

    def region(self, rank: int) -> Region:
        return self.layout.region(self.shape, rank)

    def interval(self, rank: int, dim: int | None) -> tuple[int, int]:
        """The interval of a dim that a rank holds."""
        return self.region(rank)[dim] if dim is not None else (0, 1)

    def cuts(self, dim: int | None) -> list[tuple[int, int]]:
        """The distinct intervals into which a dim is cut, without empty ones."""
        found = {self.interval(rank, dim) for rank in self.layout.placement}
        return sorted(interval for interval in found if interval[1] > interval[0]) or [(0, self.size(dim))]


def tensor_html(
    dtype: str,
    itemsize: int,
    shape: tuple[int, ...],
    layout: Layout,
    values: Any = None,
    absent: str = "",
    hue: int | None = None,
) -> str:
    """The picture as HTML.

    Args:
        dtype: ``float32``.
        itemsize: bytes per element.
        shape: logical sizes.
        values: the logical tensor, on the CPU; None if it was not collected.
        absent: the reason why there are no values.
        hue: the colour of all ranks, for pages that give each stage a colour. None: the rank's row chooses it.

    >>> from workbench.core.placement import Placement
    >>> layout = Layout.of(Placement.of("cpu", [0, 1]), "S(0)")
    >>> "rank 1" in tensor_html("float32", 4, (8, 16), layout)
    True
    """
    subject = Subject.of(shape, layout, itemsize, hue)
    numbers = _numbers(values, subject) if values is not None else f'<div class="muted">{escape(absent)}</div>'
    return (
        f'<div class="{_CLASS}"><style>{style_sheet(f".{_CLASS}")}{_STYLE}</style>'
        f"{_head(dtype, itemsize, subject, values is not None)}"
        f'<div class="sides">{numbers}{_cards(subject)}</div></div>'
    )


def drawn_dims(shape: Sequence[int], layout: Layout) -> tuple[int | None, int | None]:
    """The dims that are drawn downwards and across: split dims first, then the last ones."""
    split = sorted({entry.dim for entry in layout.sbp if isinstance(entry, Split)})
    others = [dim for dim in reversed(range(len(shape))) if dim not in split]
    chosen = sorted([*split, *others][:2])
    if len(chosen) == 2:
        return chosen[0], chosen[1]
    return None, (chosen[0] if chosen else None)


def _head(dtype: str, itemsize: int, subject: Subject, has_values: bool) -> str:
    shape, layout, placement = subject.shape, subject.layout, subject.layout.placement
    per_rank = max(math.prod(layout.local_shape(shape, rank)) for rank in placement) * itemsize
    facts = [f"{format_bytes(math.prod(shape) * itemsize)} logical", f"{format_bytes(per_rank)} per rank"]
    if layout.num_replicas > 1:
        facts.append(f"{layout.num_replicas} copies")
    partial = [axis for axis, entry in enumerate(layout.sbp) if isinstance(entry, Partial)]
    if partial and has_values:
        entry = layout.sbp[partial[0]]
        kind = {"sum": "summed", "max": "the largest", "min": "the smallest"}[entry.reduction]  # type: ignore[union-attr]
        axes = "" if placement.num_axes == 1 else f" over axis {' and '.join(map(str, partial))}"
        facts.append(f"values shown are {kind}{axes or ' over the ranks'}")
    what = f"<b>{escape(dtype)}{list(shape)}</b>{escape(', '.join(map(repr, layout.sbp)))}"
    where = f'<span class="muted">on</span> {placement.device_type} {escape(_short_ranks(placement))}'
    return f'<div class="head">{what} {where} <span class="muted">&ensp;{" &middot; ".join(facts)}</span></div>'


def _short_ranks(placement: Placement) -> str:
    text = str(placement.ranks)
    if len(text) <= 60:
        return text
    return f"{format_ranks(placement.grid)} as {' x '.join(map(str, placement.shape))}"


# The numbers: rules at the edges of shards, and beside each row the ranks that hold it.


def _numbers(values: Any, subject: Subject) -> str:
    shape, dims = subject.shape, subject.dims
    if 0 in shape:
        return '<div class="muted">no elements</div>'
    row_cuts, column_cuts = subject.cuts(dims[0]), subject.cuts(dims[1])
    rows = shown(subject.size(dims[0]), [start for start, _ in row_cuts])
    columns = shown(subject.size(dims[1]), [start for start, _ in column_cuts], whole=7)
    cells = written(matrix_of(values, dims), rows, columns)
    head = "".join(f"<th>{'' if index is None or dims[1] is None else index}</th>" for index in columns)
    lefts = {start for start, _ in column_cuts if start}
    body = "".join(
        f"{_row_head(index, subject)}{_row_numbers(index, line, columns, row_cuts, lefts)}"
        f"{_row_owners(index, row_cuts, subject)}</tr>"
        for index, line in zip(rows, cells, strict=True)
    )
    where = ", ".join(":" if dim in dims else "0" for dim in range(len(shape)))
    note = f'<div class="muted">[{where}] of {len(shape)} dims</div>' if len(shape) > 2 else ""
    return f'<div>{note}<table class="numbers"><tr><th></th>{head}<th></th></tr>{body}</table></div>'


def _row_head(index: int | None, subject: Subject) -> str:
    return f"<tr><th>{'' if index is None or subject.dims[0] is None else index}</th>"


def _row_numbers(
    index: int | None,
    line: Sequence[str],
    columns: Sequence[int | None],
    row_cuts: Sequence[tuple[int, int]],
    lefts: set[int],
) -> str:
    """One row. Rules are above the first row and left of the first column of a shard."""
    above = "above" if index and index in {start for start, _ in row_cuts} else ""
    return "".join(
        f'<td class="{above}{" left" if column in lefts else ""}">{escape(text)}</td>'
        for column, text in zip(columns, line, strict=True)
    )


def _row_owners(index: int | None, row_cuts: Sequence[tuple[int, int]], subject: Subject) -> str:
    if index is None:
        return '<td class="who" style="border-left-color: transparent"></td>'
    part = next(number for number, (start, stop) in enumerate(row_cuts) if start <= index < stop)
    first = index == row_cuts[part][0]
    owners = escape(_owners(row_cuts[part], subject)) if first else ""
    above = " above" if first and index else ""
    return f'<td class="who{above}" style="border-left-color: {_colour_of(part, 0)}">{owners}</td>'


def _owners(interval: tuple[int, int], subject: Subject) -> str:
    """The ranks that hold these rows: ``ranks 0 = 1``. ``=`` joins copies, ``+`` terms, ``|`` other columns."""
    holders = [rank for rank in subject.layout.placement if subject.interval(rank, subject.dims[0]) == interval]
    if len(holders) == 1:
        return f"rank {holders[0]}"
    if len(holders) > 4:
        return f"ranks {format_ranks(holders)}"
    joints = [_relation(subject.layout, a, b) for a, b in itertools.pairwise(holders)]
    return "ranks " + "".join(f"{rank} {joint} " for rank, joint in zip(holders, [*joints, ""], strict=True)).strip()


def _relation(layout: Layout, a: int, b: int) -> str:
    """The sign between the shards of two neighbours."""
    here, there = layout.placement.coordinates(a), layout.placement.coordinates(b)
    entries = [entry for x, y, entry in zip(here, there, layout.sbp, strict=True) if x != y]
    if all(isinstance(entry, Broadcast) for entry in entries):
        return "="
    partial = next((entry for entry in entries if isinstance(entry, Partial)), None)
    if partial is not None and not any(isinstance(entry, Split) for entry in entries):
        return "+" if partial.reduction == "sum" else partial.reduction
    return "|"


# The cards: one per rank, in the grid of the placement.


def _cards(subject: Subject) -> str:
    """The grid of the placement. The last axis runs across, the one before downwards, further axes side by side."""
    *outer, num_rows, num_columns = (1, 1, *subject.layout.placement.shape)
    num_others = math.prod(outer)
    rows, columns = _kept(num_rows, num_columns * num_others), _kept(num_columns, num_rows * num_others)
    outer_axes = subject.layout.placement.num_axes - 2
    blocks = []
    for place in itertools.product(*(range(size) for size in subject.layout.placement.shape[: max(0, outer_axes)])):
        parts = [
            f"<div>{_between(subject.layout, place, row, columns[at // 2], columns[at // 2 + 1])}</div>"
            if at % 2
            else _card(subject, place, row, columns[at // 2])
            for row in rows
            for at in range(2 * len(columns) - 1)
        ]
        title = f"<div class='muted'>at {', '.join(map(str, place))}</div>" if place else ""
        template = f"grid-template-columns: repeat({2 * len(columns) - 1}, max-content)"
        blocks.append(f"<div>{title}<div class='cards' style='{template}'>{''.join(parts)}</div></div>")
    return f"<div>{_axes_note(subject.layout)}<div class='sides'>{''.join(blocks)}</div></div>"


def _kept(size: int, others: int) -> list[int | None]:
    """Positions along an axis. With many ranks: the first two, None, and the last one."""
    if size * others <= MAX_RANKS or size <= 3:
        return list(range(size))
    return [0, 1, None, size - 1]


def _axes_note(layout: Layout) -> str:
    if layout.placement.num_axes == 1:
        return ""
    downwards = layout.placement.num_axes - 2
    names = [f"axis {downwards} &darr; {layout.sbp[downwards]!r}", f"axis {downwards + 1} &rarr; {layout.sbp[-1]!r}"]
    others = [f"axis {axis}: {layout.sbp[axis]!r}" for axis in range(downwards)]
    return f"<div class='muted'>{' &ensp; '.join([*others, *names])}</div>"


def _coordinates(layout: Layout, place: tuple[int, ...], row: int, column: int) -> tuple[int, ...]:
    return (*place, row, column)[-layout.placement.num_axes :]


def _between(layout: Layout, place: tuple[int, ...], row: int | None, left: int | None, right: int | None) -> str:
    if row is None or left is None or right is None:
        return ""
    joint = _relation(layout, *(layout.placement.rank_at(_coordinates(layout, place, row, at)) for at in (left, right)))
    return "" if joint == "|" else f"<b>{joint}</b>"


def _card(subject: Subject, place: tuple[int, ...], row: int | None, column: int | None) -> str:
    if row is None or column is None:
        return "<div class='muted'>...</div>"
    coordinates = _coordinates(subject.layout, place, row, column)
    rank = subject.layout.placement.rank_at(coordinates)
    hue, shade = coordinates[-2:] if len(coordinates) > 1 else (coordinates[0], 0)
    if subject.hue is not None:
        hue, shade = subject.hue, list(subject.layout.placement).index(rank)
    held = list(_words(subject, rank))
    words, colour = "<br>".join(map(escape, held)), _colour_of(hue, shade)
    sizes = list(subject.layout.local_shape(subject.shape, rank))
    size = format_bytes(math.prod(sizes) * subject.itemsize)
    tip = escape(f"rank {rank}: {', '.join(held)}, {size}", quote=True)
    return (
        f"<div class='card' title='{tip}'><div class='top'><b style='color: {colour}'><span>rank {rank}</span></b>"
        f"<span class='muted'>{sizes}</span></div>"
        f"<div class='row'>{_slice_picture(subject, rank, colour)}<div class='muted'>{words}</div></div></div>"
    )


def _words(subject: Subject, rank: int) -> Iterator[str]:
    """A rank's shard in words."""
    names = {subject.dims[0]: "rows", subject.dims[1]: "columns"} if len(subject.shape) == 2 else {}
    whole = True
    for dim, (start, stop) in enumerate(subject.region(rank)):
        if (start, stop) == (0, subject.shape[dim]):
            continue
        whole = False
        name = names.get(dim, f"dim {dim}:")
        if stop == start:
            yield f"no {name.rstrip(':')}"
        else:
            yield f"{name} {start}" + (f"-{stop - 1}" if stop - start > 1 else "")
    if subject.layout.has_partial:
        sums = any(isinstance(entry, Partial) and entry.reduction == "sum" for entry in subject.layout.sbp)
        yield "a term of a sum" if sums else "a candidate"
    elif whole and 0 not in subject.shape:
        yield "all of it"


def _slice_picture(subject: Subject, rank: int, colour: str) -> str:
    """The outline of the whole tensor, and in it the rank's slice, hatched if it is a term of a sum."""
    rows, columns = (max(1, subject.size(dim)) for dim in subject.dims)
    width, height = _OUTLINE
    ratio = min(4.0, max(0.25, columns / rows))
    width, height = (width, width / ratio) if ratio > width / height else (height * ratio, height)
    (top, bottom), (left, right) = (subject.interval(rank, dim) for dim in subject.dims)
    x, y = left / columns * width, top / rows * height
    w, h = max(_THINNEST, (right - left) / columns * width), max(_THINNEST, (bottom - top) / rows * height)
    box = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
    held = "" if 0 in subject.layout.local_shape(subject.shape, rank) else f'<rect {box} style="fill: {colour}"/>'
    if held and subject.layout.has_partial:
        starts = range(4, int(width + height), 6)
        lines = " ".join(f"M{at} {y - 1:.0f} l{-height - 2:.0f} {height + 2:.0f}" for at in starts)
        held += (
            f'<svg {box} viewBox="{x:.1f} {y:.1f} {w:.1f} {h:.1f}">'
            f'<path d="{lines}" style="stroke: var(--wb-background); stroke-width: 2"/></svg>'
        )
    size = f'width="{width + 2:.0f}" height="{height + 2:.0f}" viewBox="-1 -1 {width + 2:.1f} {height + 2:.1f}"'
    outline = f'<rect width="{width:.1f}" height="{height:.1f}" style="fill: none; stroke: var(--wb-muted)"/>'
    return f"<svg {size}>{held}{outline}</svg>"


def _colour_of(hue: int, shade: int) -> str:
    return f"var(--wb-stage-{hue % _HUES}{'-second' if shade % _SHADES else ''})"
