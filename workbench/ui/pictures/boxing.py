"""Draws a boxing plan: every rank's old shard, its new shard, and the rank from which each slice comes.

A pure function: plan -> SVG. Each rank has one row. It shows the outline of the whole tensor twice: with the old shard
on the left, with the new shard on the right. Colour and number of a slice name its source rank. A slice that stays on
its rank has no line. Terms of one sum are drawn side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from workbench.core.boxing import BoxingPlan
from workbench.core.boxing_path import BoxingPath
from workbench.core.layout import Region, format_sbp
from workbench.core.moves import Move
from workbench.theme import LIGHT, UI_FONT, Palette, palette
from workbench.ui.pictures.svg import Picture
from workbench.units import format_bytes

MAX_RANKS = 16
_PANEL_WIDTH, _PANEL_HEIGHT = 190.0, 96.0
_LEFT, _TOP, _ROW_GAP = 118.0, 66.0, 26.0
_BETWEEN = 250.0
_RIGHT_MARGIN = 132.0


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle on the page."""

    x: float
    y: float
    width: float
    height: float


def draw_boxing(plan: BoxingPlan | BoxingPath, *, theme: str = "light") -> Picture:
    """A picture of a boxing, ``x.boxing_plan(sbp=...)``: which slice goes from which rank to which.

    Raises:
        ValueError: more than 2 dims or 16 ranks, or a boxing path of several steps. Draw each of its ``steps``.

    >>> p = wb.placement("cpu", ranks=[0, 1])
    >>> picture = wb.draw.boxing(wb.debug.boxing_plan((p, "S(0)"), (p, "B"), (4, 4)))
    >>> picture.save("/dev/null")
    """
    if not isinstance(plan, BoxingPlan):
        raise ValueError(
            f"wb.draw.boxing: a path of {len(plan.steps)} boxings, but a picture shows 1. Draw each of plan.steps."
        )
    return Picture(plan_picture(plan, palette(theme)), str(plan))


def plan_picture(plan: BoxingPlan, colours: Palette = LIGHT) -> str:
    """The plan as SVG text. The tensor has one or two dims, and at most 16 ranks take part.

    Raises:
        ValueError: the tensor has other dims, or more ranks take part.
    """
    ranks = sorted({*plan.source.placement, *plan.destination.placement})
    if not 1 <= len(plan.shape) <= 2 or len(ranks) > MAX_RANKS:
        raise ValueError(
            f"plan_picture: a plan of {len(plan.shape)} dims between {len(ranks)} ranks; a picture has room for 1 or 2 "
            f"dims and {MAX_RANKS} ranks. Print the plan instead."
        )
    return _Picture(plan, ranks, colours).draw()


class _Picture:
    def __init__(self, plan: BoxingPlan, ranks: list[int], colours: Palette) -> None:
        self.plan, self.ranks, self.colours = plan, ranks, colours
        rows, columns = (1, *plan.shape)[-2:]
        scale = min(_PANEL_WIDTH / max(1, columns), _PANEL_HEIGHT / max(1, rows))
        self.scale_x, self.scale_y = (scale, scale) if rows > 1 else (scale, min(_PANEL_HEIGHT, 28.0))
        self.panel = (columns * self.scale_x, rows * self.scale_y)
        self.right = _LEFT + self.panel[0] + _BETWEEN

    def draw(self) -> str:
        width = self.right + self.panel[0] + _RIGHT_MARGIN
        height = self._row_top(len(self.ranks)) + 14
        size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        font = f'font-family="{escape(UI_FONT)}" font-size="12" fill="{self.colours.ink}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
            f"<title>{escape(self.plan.title)}</title>",
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="{self.colours.background}"/>',
            *self._heading(width),
            *self._lines(),
            *(part for index, rank in enumerate(self.ranks) for part in self._row(index, rank)),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _heading(self, width: float) -> Iterator[str]:
        plan = self.plan
        for x, layout, verb in ((_LEFT, plan.source, "has"), (self.right, plan.destination, "gets")):
            text = escape(f"{verb} {format_sbp(layout.sbp)}")
            yield f'<text x="{x + self.panel[0] / 2:.1f}" y="50" text-anchor="middle" font-weight="600">{text}</text>'
        shape = " × ".join(map(str, plan.shape))
        text = f"{plan.kind} of a tensor of {shape}: {format_bytes(plan.wire_bytes)} on the wire"
        yield (
            f'<text x="{(_LEFT + self.panel[0] + self.right) / 2:.1f}" y="24" text-anchor="middle" font-size="14">'
            f"{escape(text)}</text>"
        )

    def _row(self, index: int, rank: int) -> Iterator[str]:
        plan, top = self.plan, self._row_top(index)
        middle = top + self.panel[1] / 2
        sent, received = plan.bytes_sent.get(rank, 0), plan.bytes_received.get(rank, 0)
        yield f'<text x="16" y="{middle - 3:.1f}" font-weight="600">rank {rank}</text>'
        if rank in plan.source.placement:
            yield self._note(16, middle + 13, f"sends {format_bytes(sent)}")
            yield self._outline(_LEFT, top)
            yield from self._own_shard(rank, top)
        if rank in plan.destination.placement:
            yield self._note(self.right + self.panel[0] + 14, middle + 4, f"receives {format_bytes(received)}")
            yield self._outline(self.right, top)
            for move in plan.moves_to(rank):
                yield from self._slice(self._place(move, top), move.source, self._origin(move))

    def _own_shard(self, rank: int, top: float) -> Iterator[str]:
        """The old shard, slice by slice, each with the ranks that receive it. One piece if no rank receives any."""
        takers: dict[Region, list[int]] = {}
        for move in self.plan.moves_from(rank):
            takers.setdefault(move.source_region, []).append(move.destination)
        shard = self.plan.source.region(self.plan.shape, rank)
        for region, destinations in takers.items() or [(tuple((0, b - a) for a, b in shard), [])]:
            box = self._box(_LEFT, top, _shifted(region, shard))
            others = [str(taker) for taker in destinations if taker != rank]
            yield from self._slice(box, rank, "→ " + ", ".join(others) if others else "own")

    def _sharing(self, move: Move) -> list[Move]:
        """The moves to the same place: the terms of one sum."""
        return [m for m in self.plan.moves_to(move.destination) if m.destination_region == move.destination_region]

    def _origin(self, move: Move) -> str:
        name = "own" if move.source == move.destination else str(move.source)
        return f"+ {name}" if self.plan.reduction == "sum" and self._sharing(move)[0] is not move else name

    def _place(self, move: Move, top: float) -> _Box:
        """The place where a slice arrives. Terms of one sum share it."""
        shard = self.plan.destination.region(self.plan.shape, move.destination)
        box = self._box(self.right, top, _shifted(move.destination_region, shard))
        sharing = self._sharing(move)
        width = box.width / len(sharing)
        return _Box(box.x + sharing.index(move) * width, box.y, width, box.height)

    def _lines(self) -> Iterator[str]:
        """One line per slice that moves. Its width grows with the slice's elements."""
        moves = [move for move in self.plan.moves if move.source != move.destination]
        largest = max((move.num_elements for move in moves), default=1)
        for move in moves:
            shard = self.plan.source.region(self.plan.shape, move.source)
            start = self._box(_LEFT, self._row_top(self.ranks.index(move.source)), _shifted(move.source_region, shard))
            end = self._place(move, self._row_top(self.ranks.index(move.destination)))
            x, y = _LEFT + self.panel[0] + 3, start.y + start.height / 2
            to_x, to_y = self.right - 3, end.y + end.height / 2
            bend = _BETWEEN / 2
            yield (
                f'<path d="M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}" '
                f'fill="none" stroke="{self._colour(move.source)}" opacity="0.85" '
                f'stroke-width="{1 + 2 * move.num_elements / largest:.1f}"/>'
            )

    def _slice(self, box: _Box, source: int, label: str) -> Iterator[str]:
        yield (
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
            f'fill="{self._colour(source)}" stroke="{self.colours.background}"/>'
        )
        if box.height >= 11 and box.width >= 6.5 * len(label):
            ink = self.colours.background if source % 2 == 0 else self.colours.ink
            if self.colours.name == "dark":
                ink = self.colours.background
            yield (
                f'<text x="{box.x + box.width / 2:.1f}" y="{box.y + box.height / 2 + 4:.1f}" text-anchor="middle" '
                f'font-size="11" fill="{ink}">{label}</text>'
            )

    def _note(self, x: float, y: float, text: str) -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" fill="{self.colours.muted}">{escape(text)}</text>'

    def _outline(self, x: float, y: float) -> str:
        width, height = self.panel
        return (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{self.colours.sunk}" '
            f'stroke="{self.colours.strong_line}"/>'
        )

    def _box(self, left: float, top: float, region: Region) -> _Box:
        (row, end_row), (column, end_column) = ((0, 1), *region)[-2:]
        return _Box(
            left + column * self.scale_x,
            top + row * self.scale_y,
            (end_column - column) * self.scale_x,
            (end_row - row) * self.scale_y,
        )

    def _colour(self, rank: int) -> str:
        return self.colours.rank_colour(rank // 2, rank % 2)

    def _row_top(self, index: int) -> float:
        return _TOP + index * (self.panel[1] + _ROW_GAP)


def _shifted(region: Region, shard: Region) -> Region:
    """A region of a shard, in indices of the whole tensor."""
    return tuple((base + start, base + stop) for (start, stop), (base, _) in zip(region, shard, strict=True))
