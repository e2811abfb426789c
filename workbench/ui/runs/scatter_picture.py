"""Memory against throughput as an SVG picture of 308 px: small, and without a script."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from html import escape
from itertools import pairwise

from workbench.ui.assets import element
from workbench.ui.number_text import short_number
from workbench.ui.pictures import panel_svg
from workbench.ui.pictures.svg import text_width
from workbench.ui.runs.table_rows import Row
from workbench.ui.short_names import short_names
from workbench.units import byte_scale

WIDTH, HEIGHT = 308, 400
_LEFT, _RIGHT, _TOP = 40.0, 298.0, 34.0
_BELOW = 48.0
"""Pixels of the lower axis with its words."""
_RING, _SELECTED_RING = 6.5, 11.0
_LOWEST, _PER_ROW = 300, 42
"""The picture is about as high as the table beside it."""


def scatter_picture(rows: Sequence[Row], selected: str = "", limit_bytes: float | None = None) -> str:
    """The rows that have both numbers. Pareto points are filled and joined by steps, the others hollow, the truth and a
    chosen baseline squares; labels never cover each other, and those for which there is no room are left out.

    Colours are style-sheet variables, so it reads in both themes. Every point carries its key as ``data-key``.
    """
    drawn = [row for row in rows if row.values["peak_bytes"] and row.values["samples_per_s"]]
    if not drawn:
        return element("p", text="no finished runs yet", css="wb-quiet")
    memory = [float(row.values["peak_bytes"] or 0) for row in drawn]
    rate = [float(row.values["samples_per_s"] or 0) for row in drawn]
    divisor, unit = byte_scale(max(memory))
    height = min(HEIGHT, max(_LOWEST, _PER_ROW * len(rows)))
    bottom = height - _BELOW
    x_axis = panel_svg.Axis.over([size / divisor for size in [*memory, limit_bytes or memory[0]]], _LEFT, _RIGHT)
    spreads = [row.spread.get("samples_per_s", 0.0) for row in drawn]
    ends = [r + side for r, spread in zip(rate, spreads, strict=True) for side in (-spread, spread)]
    y_axis = panel_svg.Axis.over(ends, bottom, _TOP)
    points = [(x_axis.at(m / divisor), y_axis.at(r)) for m, r in zip(memory, rate, strict=True)]
    fronts = _fronts(drawn, points, bottom)
    axes = f"peak memory per rank, {unit} (less is better)", "samples/s (more is better)"
    parts = [*panel_svg.frame(x_axis, y_axis, axes, short_number, short_number), *map(_path, fronts)]
    lines = [(_LEFT, bottom, _RIGHT, bottom + 1)]
    lines += [(*start, *stop) for front in fronts for start, stop in pairwise(front)]
    if limit_bytes:
        x = x_axis.at(limit_bytes / divisor)
        words = f"limit {limit_bytes / divisor:.3g}"
        lines += [(x, _TOP - 8, x, bottom), (x - 4 - text_width(words), bottom - 18, x, bottom - 5)]
        parts.append(panel_svg.line(x, _TOP - 8, x, bottom, "wb-limit"))
        parts.append(panel_svg.text(x - 4, bottom - 8, words, "end error"))
    order = sorted(range(len(drawn)), key=lambda i: not (drawn[i].on_front or drawn[i].key == selected))
    bars = [(x, y_axis.at(r - s), y_axis.at(r + s)) for (x, _), r, s in zip(points, rate, spreads, strict=True) if s]
    bar_ends = [(x, y) for x, low, high in bars if low - high > _RING for y in (low, high)]
    lines += [(x, low, x, high) for x, low, high in bars]
    ring = _SELECTED_RING if any(row.key == selected for row in drawn) else _RING
    labels = _labels([(drawn[i], points[i]) for i in order], [*points, *bar_ends], lines, ring)
    parts += [line for bar in bars for line in _error_bar(*bar)]
    parts += [_point(row, point, row.key == selected) for row, point in zip(drawn, points, strict=True)]
    svg = "".join([*parts, *labels])
    description = f"Memory against throughput of {len(drawn)} runs"
    return (
        f'<svg class="wb-scatter" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(description)}">{svg}</svg>'
    )


def _fronts(rows: Sequence[Row], points: Sequence[tuple[float, float]], bottom: float) -> list[list[Point]]:
    """The corners of the Pareto line of each task and machine: up from the axis, then right and up to every point."""
    fronts: dict[Hashable, list[Point]] = {}
    for row, point in zip(rows, points, strict=True):
        if row.on_front:
            fronts.setdefault(row.peers, []).append(point)
    return [_corners(sorted(front), bottom) for front in fronts.values()]


def _corners(front: Sequence[Point], bottom: float) -> list[Point]:
    corners = [(front[0][0], bottom), front[0]]
    for x, y in front[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return [*corners, (_RIGHT, corners[-1][1])]


def _path(corners: Sequence[Point]) -> str:
    path = " ".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    return f'<path class="wb-front-line" d="M{path}"/>'


def _error_bar(x: float, low: float, high: float) -> Sequence[str]:
    """A standard deviation of throughput to both sides."""
    ends = [panel_svg.line(x - 4, y, x + 4, y, "spread") for y in (low, high)]
    return [panel_svg.line(x, low, x, high, "spread"), *ends]


def _point(row: Row, point: tuple[float, float], selected: bool) -> str:
    x, y = point
    rate = f"{row.texts['samples_per_s']} {row.spread_text('samples_per_s')}".strip()
    description = f"{row.name}: {rate} samples/s, {row.texts['peak_bytes']}"
    tip = f"<title>{escape(description)}</title>"
    ring = f'<circle class="wb-ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>' if selected else ""
    if row.is_truth or row.is_baseline:
        mark = f'<rect class="square" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10">{tip}</rect>'
    else:
        css = "full" if row.on_front else "hollow"
        mark = f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="5">{tip}</circle>'
    return f'<g data-key="{escape(row.key, quote=True)}">{ring}{mark}</g>'


def _labels(
    rows: Sequence[tuple[Row, tuple[float, float]]],
    points: Sequence[tuple[float, float]],
    lines: Sequence[tuple[float, float, float, float]],
    ring: float,
) -> list[str]:
    """Names of the points, bold on the Pareto line."""
    names = short_names([row.name for row, _ in rows])
    on_front = {name for name, (row, _) in zip(names, rows, strict=True) if row.on_front}
    named = [(name, point) for name, (_, point) in zip(names, rows, strict=True)]
    placed = place_labels(named, points, (_LEFT, WIDTH - 2.0), ring, lines)
    return [
        panel_svg.text(x, y, name, f"{anchor} strong" if name in on_front else anchor) for x, y, anchor, name in placed
    ]


Point = tuple[float, float]
Box = tuple[float, float, float, float]
_SIZE = 12


def place_labels(
    names: Sequence[tuple[str, Point]],
    points: Sequence[Point],
    within: tuple[float, float],
    ring: float = 6.0,
    lines: Sequence[Box] = (),
) -> list[tuple[float, float, str, str]]:
    """(x, y, anchor, name) of the names that have room; earlier names get room first. Anchors: "middle", "", "end".

    Each is on the first free side. No name covers a point or another name, nor lies on a line unless all sides do.

    Args:
        names: the names with their points, the important ones first.
        points: the points that no name may cover.
        within: left and right end of the space for names.
        ring: pixels around a point that stay free.
        lines: x and y of two opposite corners of what a name covers only where it has no other place: lines, words.
    """
    beside = ring + 3
    crossed = [(min(x, u) - 0.5, min(y, v) - 0.5, max(x, u) + 0.5, max(y, v) + 0.5) for x, y, u, v in lines]
    taken = [(x - ring, y - ring, x + ring, y + ring) for x, y in points]
    found = []
    for name, (x, y) in names:
        width = text_width(name, _SIZE) + 2
        centre = min(max(x, within[0] + width / 2), within[1] - width / 2)
        free = []
        above, below = y - beside, y + ring + 13
        for at, base, anchor, left in (
            (centre, above, "middle", centre - width / 2),
            (centre, below, "middle", centre - width / 2),
            (x + beside, y + 4, "", x + beside),
            (x - beside, y + 4, "end", x - beside - width),
            *((x + side * ring, base, "end", x + side * ring - width) for side in (1, -1) for base in (above, below)),
            *((x - side * ring, base, "", x - side * ring) for side in (1, -1) for base in (above, below)),
        ):
            box = (left, base - 10, left + width, base + 3)
            if within[0] <= left and box[2] <= within[1] and not any(_shared(box, other) for other in taken):
                free.append(((at, base, anchor, name), box))
        if free:
            label, box = min(free, key=lambda place: sum(_shared(place[1], line) for line in crossed))
            found.append(label)
            taken.append(box)
    return found


def _shared(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
