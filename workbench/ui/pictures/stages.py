"""Draws the grid of a large run: pipeline stages, and in each of them the data axis and the model axis.

A pure function: one weight per stage -> SVG. In a large grid one stage is drawn rank by rank. The other stages are
cards with the numbers of their ranks. So grids of thousands of ranks stay readable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout, format_sbp
from workbench.core.sbp import Broadcast, Partial, Split
from workbench.theme import Palette, palette
from workbench.ui.number_text import from_to
from workbench.ui.pictures.matmul import draw_matrix
from workbench.ui.pictures.matmul_layouts import ShardedMatrix, layout_of
from workbench.ui.pictures.svg import Box, Picture, arrow, document, lengths, rect, text
from workbench.units import format_bytes, format_count, format_ranks

_OPEN_RANKS = 16
"""In grids of at most so many ranks, every stage is drawn rank by rank."""
_MOST_SHOWN = 8
_MOST_LINES = 32
_CELL = (56.0, 34.0)
_PITCH = (72.0, 62.0)
_NARROWEST = 140.0
_LEFT, _TOP, _CARD, _BETWEEN = 28.0, 96.0, 116.0, 46.0
_MODES = {Split: "model parallel", Broadcast: "data parallel", Partial: "terms of a sum"}
Stage = Any


def draw_stages(
    *stages: Stage, names: Sequence[str] = ("data", "model"), itemsize: int = 4, theme: str = "light"
) -> Picture:
    """A picture of a pipeline of stages. Each stage is a grid of ranks with their slices of a weight.

    Args:
        stages: for each stage a weight of two dims on the stage's ranks. Its placement has one or two axes. Give a live
            tensor, or ``(layout, shape)`` of a weight that is too large for this machine.
        names: names of the two axes of ranks, e.g. ``("host", "GPU")``.
        itemsize: bytes per element.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        ValueError: no stage, a tensor without a layout or without two dims, or a placement of more than two axes.

    >>> from workbench.core.layout import Layout
    >>> from workbench.core.placement import Placement
    >>> grids = [[[s * 48 + host * 8 + gpu for gpu in range(8)] for host in range(6)] for s in range(64)]
    >>> layouts = [Layout.of(Placement.of("cuda", grid), "B, S(1)") for grid in grids]
    >>> wb.draw.stages(*((layout, (12288, 49152)) for layout in layouts), names=("host", "GPU"))
    64 stages x 6 x 8 = 3072 ranks
    stage 0: ranks 0-47, weight [12288, 49152] (B, S(1)), 6144 columns each
    stages 1 to 63: the same on the ranks that follow
    host: data parallel on 6, the gradient's all-reduce moves 24.2 GB in every stage
    GPU: model parallel on 8
    """
    if not stages:
        raise ValueError("wb.draw.stages(): 0 stages; give a weight of each, as in wb.draw.stages(w0, w1).")
    grid = Grid(tuple(_stage(stage, number) for number, stage in enumerate(stages)), tuple(names), itemsize)
    return Picture(stages_picture(grid, palette(theme)), grid.text)


def _stage(stage: Stage, number: int) -> ShardedMatrix:
    layout, shape = stage if isinstance(stage, tuple) else (layout_of(stage), tuple(stage.shape))
    if layout is None or len(shape) != 2 or layout.placement.num_axes > 2:
        axes = f"{layout.placement.num_axes} axes" if layout else "no placement"
        raise ValueError(
            f"wb.draw.stages: stage {number} has a weight of {len(shape)} dims and {axes}. A stage is drawn from a "
            "global tensor of 2 dims on a placement of 1 or 2 axes (data, model)."
        )
    return ShardedMatrix(f"w{number}", tuple(shape), layout)


@dataclass(frozen=True)
class Grid:
    """One weight per stage, the names of the axes, and the bytes per element."""

    stages: tuple[ShardedMatrix, ...]
    names: tuple[str, ...]
    itemsize: int

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all stages."""
        return len({rank for stage in self.stages for rank in stage.ranks})

    @property
    def is_open(self) -> bool:
        """Whether every stage is drawn rank by rank."""
        return self.num_ranks <= _OPEN_RANKS

    @property
    def is_regular(self) -> bool:
        """Whether all stages have the first one's layout, on consecutive ranks."""
        layouts = map(layout_of_stage, self.stages)
        kinds = {(stage.shape, it.sbp, it.placement.shape) for stage, it in zip(self.stages, layouts, strict=True)}
        return len(kinds) == 1 and all(_follows(stage, self.stages[0]) for stage in self.stages)

    @property
    def size(self) -> str:
        """The size in words: ``"64 stages x 6 x 8 = 3072 ranks"``."""
        shape, *others = {layout_of_stage(stage).placement.shape for stage in self.stages}
        stages = f"{len(self.stages)} stage{'s' * (len(self.stages) > 1)}"
        is_product = not others and self.num_ranks == len(self.stages) * prod(shape)
        grid = " x ".join(map(str, shape)) if is_product else "unlike grids"
        return f"{stages} x {grid} = {self.num_ranks} rank{'s' * (self.num_ranks > 1)}"

    @property
    def text(self) -> str:
        """The grid in words."""
        first = self.stages[0]
        lines = [self.size, f"stage 0: {stage_text(first)}"]
        if len(self.stages) > 1 and self.is_regular:
            others = "stage 1" if len(self.stages) == 2 else f"stages 1 to {len(self.stages) - 1}"
            lines.append(f"{others}: the same on the ranks that follow")
        elif not self.is_regular:
            lines += [f"stage {i}: {stage_text(stage)}" for i, stage in enumerate(self.stages) if i]
        return "\n".join([*lines, *(f"{name}: {description}" for name, description in self.axes())])

    def axes(self) -> list[tuple[str, str]]:
        """The name of each axis of a stage, and its use in words. Of unlike stages, those of the first one."""
        stage = self.stages[0]
        layout = layout_of_stage(stage)
        where, everywhere = ("", " in every stage") if self.is_regular else (" in stage 0", "")
        found = []
        names = self.names[-layout.placement.num_axes :]
        for name, size, entry in zip(names, layout.placement.shape, layout.sbp, strict=True):
            description = f"{_MODES[type(entry)]} on {size}" if size > 1 else "one rank"
            if isinstance(entry, Broadcast) and size > 1:
                moved = plan_boxing(layout.dual(), layout, stage.shape, self.itemsize).wire_bytes
                description += f", the gradient's all-reduce moves {format_bytes(moved)}{everywhere}"
            found.append((f"{name}{where}", description))
        return found


def layout_of_stage(stage: ShardedMatrix) -> Layout:
    """The layout of a stage, which is never None."""
    assert stage.layout is not None
    return stage.layout


def stage_text(stage: ShardedMatrix) -> str:
    """A stage in words: ``"ranks 0-47, weight [12288, 49152] (B, S(1)), 6144 columns each"``."""
    layout = layout_of_stage(stage)
    shapes = [layout.local_shape(stage.shape, rank) for rank in stage.ranks]
    sides = zip(("rows", "columns"), stage.shape, zip(*shapes, strict=True), strict=True)
    parts = [f"{from_to(sorted(sizes))} {side}" for side, whole, sizes in sides if min(sizes) < whole]
    each = " and ".join(parts) or "all of it"
    description = f"rank{'s' * (len(stage.ranks) > 1)} {format_ranks(stage.ranks)}, weight {list(stage.shape)}"
    return f"{description} {format_sbp(layout.sbp)}, {each} each"


def _follows(stage: ShardedMatrix, first: ShardedMatrix) -> bool:
    shift = stage.ranks[0] - first.ranks[0]
    return stage is first or (shift > 0 and stage.ranks == tuple(rank + shift for rank in first.ranks))


def stages_picture(grid: Grid, colours: Palette) -> str:
    """The grid as SVG text."""
    parts: list[str] = []
    left, height = _LEFT, 0.0
    drawn = range(len(grid.stages)) if grid.is_open else range(1)
    for number in drawn:
        if number:
            parts += arrow((left + 6, _TOP + 60), (left + _BETWEEN - 6, _TOP + 60), colours.boxing)
            left += _BETWEEN
        stage = _Stage(grid, number, left, colours)
        parts += stage.draw()
        left, height = left + stage.size[0], max(height, stage.size[1])
    if not grid.is_open:
        cards = list(_cards(grid, left, height, colours))
        parts += cards
        left += len(_card_numbers(grid)) * (_CARD + _BETWEEN)
    top = _TOP + height
    parts += [text(_LEFT, 30, grid.size.replace(" x ", " × "), anchor="start", size=15, bold=True)]
    description = [f"stage 0: {stage_text(grid.stages[0])}", *(f"{name}: {words}" for name, words in grid.axes())]
    for number, words in enumerate(description):
        parts.append(text(_LEFT, top + 26 + 18 * number, words, anchor="start", fill=colours.muted))
    width = max(left + _LEFT, _LEFT + 6.6 * max(map(len, description)))
    return document((width, top + 26 + 18 * len(description)), grid.text.partition("\n")[0], colours, parts)


def shown(size: int) -> list[int | None]:
    """The indices below ``size`` that are drawn. None is drawn as dots.

    >>> shown(3), shown(96)
    ([0, 1, 2], [0, 1, 2, 3, 4, None, 95])
    """
    return list(range(size)) if size <= _MOST_SHOWN else [*range(_MOST_SHOWN - 3), None, size - 1]


class _Stage:
    """One stage, rank by rank. The second axis runs from left to right, the first from top to bottom."""

    def __init__(self, grid: Grid, number: int, left: float, colours: Palette) -> None:
        self.grid, self.number, self.left, self.colours = grid, number, left, colours
        self.held = grid.stages[number]
        self.placement = layout_of_stage(self.held).placement
        rows, columns = (1, *self.placement.shape)[-2:]
        self.rows, self.columns = shown(rows), shown(columns)
        self.names = (*("", *grid.names)[-2:],) if len(self.placement.shape) > 1 else ("", grid.names[-1])
        self.label = 64.0 if self.names[0] else 18.0
        width = self.label + len(self.columns) * _PITCH[0] + 8
        self.label += max(0.0, _NARROWEST - width) / 2
        self.size = (max(width, _NARROWEST), 34 + len(self.rows) * _PITCH[1] + 12)
        sizes = lengths({"rows": self.held.shape[0], "columns": self.held.shape[1]}, 100.0, 45.0)
        scale = min(_CELL[0] / sizes["columns"], _CELL[1] / sizes["rows"])
        self.cell = (sizes["columns"] * scale, sizes["rows"] * scale)

    def draw(self) -> Iterator[str]:
        tint = self.colours.stage(self.number).tint
        yield rect(Box(self.left, _TOP - 44, *self._outer()), tint, self.colours.line, {"rx": "6", "class": "stage"})
        yield text(self.left + 12, _TOP - 24, f"stage {self.number}", anchor="start", bold=True)
        ranks = f"ranks {format_ranks(self.held.ranks)}"
        yield text(self.left + self.size[0] - 10, _TOP - 24, ranks, anchor="end", fill=self.colours.muted)
        for place, column in enumerate(self.columns):
            yield text(self._x(place), _TOP + 4, _named(self.names[1], column), size=11, fill=self.colours.muted)
        for place, row in enumerate(self.rows):
            y = _TOP + 16 + (place + 0.5) * _PITCH[1] - 6
            if self.names[0]:
                yield text(self.left + 12, y + 4, _named(self.names[0], row), anchor="start", size=11)
            for at, column in enumerate(self.columns):
                if row is None or column is None:
                    yield text(self._x(at), y + 4, "…", fill=self.colours.muted)
                    continue
                coordinates = (row, column) if self.placement.num_axes > 1 else (column,)
                yield from self._rank(self.placement.rank_at(coordinates), self._x(at), y)

    def _rank(self, rank: int, x: float, y: float) -> Iterator[str]:
        width, height = self.cell
        outline = Box(x - width / 2, y - height / 2, width, height)
        blue = self.colours.stages[0].shades[0]
        yield from draw_matrix(self.held, rank, outline, blue, self.colours)
        yield text(x, outline.y + height + 13, str(rank), size=11, fill=self.colours.muted)

    def _outer(self) -> tuple[float, float]:
        return self.size[0], self.size[1] + 34

    def _x(self, place: int) -> float:
        return self.left + self.label + (place + 0.5) * _PITCH[0] - 4


def _named(name: str, index: int | None) -> str:
    return "…" if index is None else f"{name} {index}"


def _card_numbers(grid: Grid) -> list[int | None]:
    rest = list(range(1, len(grid.stages)))
    return list(rest) if len(rest) <= 3 else [1, 2, None, rest[-1]]


def _cards(grid: Grid, left: float, height: float, colours: Palette) -> Iterator[str]:
    """The other stages."""
    top = _TOP - 44
    middle = top + (height + 34) / 2
    for number in _card_numbers(grid):
        yield from arrow((left + 6, middle), (left + _BETWEEN - 6, middle), colours.boxing)
        left += _BETWEEN
        if number is None:
            between = f"{format_count(len(grid.stages) - 4)} more"
            yield text(left + _CARD / 2, middle - 4, "…", size=18)
            yield text(left + _CARD / 2, middle + 16, between, fill=colours.muted)
        else:
            yield from _card(grid, number, Box(left, top, _CARD, height + 34), colours)
        left += _CARD


def _card(grid: Grid, number: int, box: Box, colours: Palette) -> Iterator[str]:
    stage, x = grid.stages[number], box.middle[0]
    yield rect(box, colours.stage(number).tint, colours.line, {"rx": "6", "class": "stage"})
    yield text(x, box.y + 20, f"stage {number}", bold=True)
    yield text(x, box.y + 38, "ranks", fill=colours.muted)
    yield text(x, box.y + 54, format_ranks(stage.ranks), fill=colours.muted)
    rows, columns = (1, *layout_of_stage(stage).placement.shape)[-2:]
    width, height = box.width - 32, min(box.height - 110, 90.0)
    left, top = box.x + 16, box.middle[1] + 14 - height / 2
    yield rect(Box(left, top, width, height), colours.background, colours.strong_line)
    lines = [f"M{left + width * i / columns:.1f} {top:.1f}v{height:.1f}" for i in range(1, columns)]
    lines += [f"M{left:.1f} {top + height * i / rows:.1f}h{width:.1f}" for i in range(1, rows)]
    if 0 < len(lines) <= _MOST_LINES:
        yield f'<path d="{"".join(lines)}" stroke="{colours.strong_line}" fill="none"/>'
    yield text(x, top + height + 18, f"{rows} × {columns}", fill=colours.muted)
