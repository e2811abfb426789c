"""Draws a boxing plan: every rank's old shard, its new shard, and the rank from which each slice comes.

A pure function: plan -> SVG. Each rank has one row. It shows the outline of the whole tensor twice: with the old shard
on the left, with the new shard on the right. Colour and number of a slice name its source rank. A slice that stays on
its rank has no line. Terms of one sum are drawn side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.core.boxing import BoxingPlan
from workbench.core.boxing_path import BoxingPath
from workbench.core.layout import Region, format_sbp
from workbench.core.moves import Move
from workbench.theme import LIGHT, Palette, palette
from workbench.ui.pictures.svg import Box, Picture, curve, document, rect, text
from workbench.units import format_bytes

MAX_RANKS = 16
_PANEL_WIDTH, _PANEL_HEIGHT, _SHORTEST = 190.0, 96.0, 28.0
_LEFT, _TOP, _ROW_GAP = 118.0, 66.0, 26.0
_BETWEEN = 250.0
_RIGHT_MARGIN = 132.0


def draw_boxing(plan: BoxingPlan | BoxingPath, *, theme: str = "light") -> Picture:
    """A picture of a boxing, ``x.boxing_plan(sbp=...)``: which slice goes from which rank to which.

    Raises:
        ValueError: more than 2 dims or 16 ranks, or no plan, or a path of several steps. Draw each of its ``steps``.

    >>> p = wb.placement(ranks=[0, 1])
    >>> picture = wb.draw.boxing(wb.debug.boxing_plan((p, "S(0)"), (p, "B"), (4, 4)))
    >>> picture.save("/dev/null")
    """
    if not isinstance(plan, (BoxingPlan, BoxingPath)):
        raise ValueError(
            f"wb.draw.boxing: a {type(plan).__name__} is no plan. Give x.boxing_plan(sbp=...), x being a global tensor."
        )
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
            f"wb.draw.boxing: a plan of {len(plan.shape)} dims between {len(ranks)} ranks; a picture has room for 1 or "
            f"2 dims and {MAX_RANKS} ranks. Print the plan instead."
        )
    return _Picture(plan, ranks, colours).draw()


class _Picture:
    def __init__(self, plan: BoxingPlan, ranks: list[int], colours: Palette) -> None:
        self.plan, self.ranks, self.colours = plan, ranks, colours
        rows, columns = (1, *plan.shape)[-2:]
        scale = min(_PANEL_WIDTH / max(1, columns), _PANEL_HEIGHT / max(1, rows))
        self.panel = (max(_SHORTEST, columns * scale), max(_SHORTEST, rows * scale) if rows > 1 else _SHORTEST)
        self.scale_x, self.scale_y = self.panel[0] / max(1, columns), self.panel[1] / max(1, rows)
        self.right = _LEFT + self.panel[0] + _BETWEEN

    def draw(self) -> str:
        size = (self.right + self.panel[0] + _RIGHT_MARGIN, self._row_top(len(self.ranks)) + 14)
        rows = (part for index, rank in enumerate(self.ranks) for part in self._row(index, rank))
        return document(size, self.plan.title, self.colours, [*self._heading(), *self._lines(), *rows])

    def _heading(self) -> Iterator[str]:
        plan = self.plan
        for x, layout, verb in ((_LEFT, plan.source, "has"), (self.right, plan.destination, "gets")):
            yield text(x + self.panel[0] / 2, 50, f"{verb} {format_sbp(layout.sbp)}", bold=True)
        shape = " × ".join(map(str, plan.shape))
        words = f"{plan.kind} of a tensor of {shape}: {format_bytes(plan.wire_bytes)} on the wire"
        yield text((_LEFT + self.panel[0] + self.right) / 2, 24, words, size=14)

    def _row(self, index: int, rank: int) -> Iterator[str]:
        plan, top = self.plan, self._row_top(index)
        middle = top + self.panel[1] / 2
        sent, received = plan.bytes_sent.get(rank, 0), plan.bytes_received.get(rank, 0)
        yield text(16, middle - 3, f"rank {rank}", anchor="start", bold=True)
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

    def _place(self, move: Move, top: float) -> Box:
        """The place where a slice arrives. Terms of one sum share it."""
        shard = self.plan.destination.region(self.plan.shape, move.destination)
        box = self._box(self.right, top, _shifted(move.destination_region, shard))
        sharing = self._sharing(move)
        width = box.width / len(sharing)
        return Box(box.x + sharing.index(move) * width, box.y, width, box.height)

    def _lines(self) -> Iterator[str]:
        """One line per slice that moves. Its width grows with the slice's elements."""
        moves = [move for move in self.plan.moves if move.source != move.destination]
        largest = max((move.num_elements for move in moves), default=1)
        for move in moves:
            shard = self.plan.source.region(self.plan.shape, move.source)
            start = self._box(_LEFT, self._row_top(self.ranks.index(move.source)), _shifted(move.source_region, shard))
            end = self._place(move, self._row_top(self.ranks.index(move.destination)))
            from_left, to_right = (_LEFT + self.panel[0] + 3, start.middle[1]), (self.right - 3, end.middle[1])
            yield curve(from_left, to_right, self._colour(move.source), 1 + 2 * move.num_elements / largest)

    def _slice(self, box: Box, source: int, label: str) -> Iterator[str]:
        yield rect(box, self._colour(source), self.colours.background)
        if box.height >= 11 and box.width >= 6.5 * len(label):
            is_pale = source % 2 == 1 and self.colours.name != "dark"
            ink = self.colours.ink if is_pale else self.colours.background
            yield text(box.middle[0], box.middle[1] + 4, label, size=11, fill=ink)

    def _note(self, x: float, y: float, words: str) -> str:
        return text(x, y, words, anchor="start", fill=self.colours.muted)

    def _outline(self, x: float, y: float) -> str:
        return rect(Box(x, y, *self.panel), self.colours.sunk, self.colours.strong_line)

    def _box(self, left: float, top: float, region: Region) -> Box:
        (row, end_row), (column, end_column) = ((0, 1), *region)[-2:]
        return Box(
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
