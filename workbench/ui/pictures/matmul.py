"""Draws a matrix product: the logical matrices, then each rank's slices of both factors and of the result.

A pure function: product -> SVG. Samples are grey, weights are blue, terms of a sum are striped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.core.boxing import describe_sbp_change
from workbench.core.layout import Region
from workbench.theme import Palette, palette
from workbench.ui.pictures.matmul_layouts import NAMES, Product, ShardedMatrix, product
from workbench.ui.pictures.svg import Box, Picture, document, lengths, line, rect, text, text_width
from workbench.units import format_bytes, format_ranks

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANKS = 16
_FEW_RANKS = 4
_LONGEST, _SHORTEST = 128.0, 34.0
_LEFT, _TOP, _SIGN, _CAPTION, _GAP = 96.0, 92.0, 34.0, 20.0, 22.0
_MOST_CELLS = 16
"""Matrices with more rows or columns are drawn without their elements."""


def draw_matmul(x: Tensor, w: Tensor, out: Tensor, *, names: Sequence[str] = NAMES, theme: str = "light") -> Picture:
    """A picture of ``out = x @ w`` of live tensors, with the slice of each matrix on every rank.

    It reads the tensors' layouts and moves no data. In the last line of a ``%%global`` cell it appears once. Plain
    tensors are drawn as on one device. A linear layer's weight, (out features, in features), is drawn transposed, as
    ``w.T``; words name its slices and its sbp as it is stored. A square one is ``w`` where the layouts allow both.

    Args:
        x, w, out: two dims each; global tensors on up to 16 ranks, or plain ones.
        names: labels of the three tensors.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        ValueError: the shapes are not those of a product, or there are more than 16 ranks.
        LayoutError: the layout of ``out`` cannot come from ``x @ w``.

    >>> p = wb.placement(ranks=[0, 1])
    >>> x, w = wb.ones(4, 5, placement=p, sbp="S(0)"), wb.ones(5, 8, placement=p, sbp="B")
    >>> wb.draw.matmul(x, w, x @ w)
    x[4, 5] S(0) @ w[5, 8] B = out[4, 8] S(0): data parallel on 2 ranks
      rank 0: x[0:2, :] @ all of w = out[0:2, :]
      rank 1: x[2:4, :] @ all of w = out[2:4, :]
    """
    one = product(x, w, out, names)
    return Picture(matmul_picture(one, palette(theme)), product_text(one))


def product_text(one: Product) -> str:
    """The product in words, one line per rank."""
    x, w, out = (f"{held.name}{list(held.stored)} {held.sbp}".rstrip() for held in (one.x, one.w, one.out))
    w = f"({w}).T" if one.w.is_turned else w
    heading = f"{x} @ {w} = {out}: {one.kind}"
    if one.out.layout is None:
        return heading
    rows = [f"  rank {r}: {one.x.words(r)} @ {one.w.words(r)} = {one.out.words(r)}" for r in one.ranks]
    return "\n".join([heading, *(f"  {words}" for words in _boxed_before(one)), *rows])


def _boxed_before(one: Product) -> list[str]:
    """A line for each boxing before the local products."""
    return [
        f"{name} is boxed before: {describe_sbp_change(plan.source, plan.destination)}, {format_bytes(plan.wire_bytes)}"
        for name, plan in one.boxings
    ]


def matmul_picture(one: Product, colours: Palette) -> str:
    """The product as SVG text.

    Raises:
        ValueError: more than 16 ranks.
    """
    check_ranks(one.ranks, "wb.draw.matmul")
    ranks = one.ranks if one.out.layout else ()
    columns = Columns.of(one, _LONGEST if len(ranks) <= _FEW_RANKS else _LONGEST / 2, _SHORTEST)
    height = max(columns.rows, columns.inner)
    row_height = height + _CAPTION + _GAP
    boxed = _boxed_before(one)
    first = _TOP + 18 * len(boxed)
    width = max([_LEFT + columns.width + 28, *(32 + text_width(words) for words in boxed)])
    size = (width, first + row_height * (1 + len(ranks)) - 4 - _CAPTION)
    parts = [
        text(16, 26, f"{one.x.name} × {one.w.factor} = {one.out.name}", anchor="start", size=15, bold=True),
        text(16, 44, one.kind, anchor="start", fill=colours.muted),
        *(text(16, 62 + 18 * i, words, anchor="start", fill=colours.boxing) for i, words in enumerate(boxed)),
        *columns.headings(_LEFT, first - 28, colours),
        text(16, first + height / 2 + 4, "logical" if ranks else "one device", anchor="start", bold=True),
        *_whole(columns, Box(_LEFT, first, 0, height), colours),
    ]
    for number, rank in enumerate(ranks, start=1):
        top = first + number * row_height - _CAPTION
        parts.append(line((16, top - _GAP / 2 - 2), (size[0] - 16, top - _GAP / 2 - 2), colours.line))
        parts += rank_label(one, rank, top + height / 2, colours)
        parts += columns.row(rank, Box(_LEFT, top, 0, height), colours)
    return document(size, product_text(one).partition("\n")[0], colours, parts)


def check_ranks(ranks: Sequence[int], where: str) -> None:
    """Raise ``ValueError`` if there are more ranks than a picture has room for."""
    if len(ranks) > MAX_RANKS:
        raise ValueError(
            f"{where}: tensors on {len(ranks)} ranks ({format_ranks(list(ranks))}); a picture has room for "
            f"{MAX_RANKS}. Draw the tensors of one stage, or the whole grid with wb.draw.stages."
        )


def rank_label(one: Product, rank: int, y: float, colours: Palette) -> Iterator[str]:
    """The rank's number, and its coordinates if the placement has several axes."""
    layout = one.out.layout
    two_lines = layout is not None and layout.placement.num_axes > 1 and rank in layout.placement
    yield text(16, y + (-3 if two_lines else 4), f"rank {rank}", anchor="start", bold=True)
    if two_lines and layout is not None:
        yield text(16, y + 12, str(layout.placement.coordinates(rank)), anchor="start", fill=colours.muted)


@dataclass(frozen=True)
class Columns:
    """The places of a product's three matrices, from left to right, and their drawn sizes in pixels."""

    one: Product
    rows: float
    inner: float
    columns: float
    widths: tuple[float, ...]

    @classmethod
    def of(cls, one: Product, longest: float, shortest: float) -> Columns:
        """Columns whose sizes are in proportion to the three dims of the product, with room for captions."""
        (n, k), m = one.x.shape, one.w.shape[1]
        drawn = lengths({"n": n, "k": k, "m": m}, longest, shortest)
        sides = (drawn["k"], drawn["m"], drawn["m"])
        widths = tuple(map(room_of, (one.x, one.w, one.out), sides))
        return cls(one, drawn["n"], drawn["k"], drawn["m"], widths)

    @property
    def width(self) -> float:
        """From the left edge of the first to the right edge of the last."""
        return sum(self.widths) + 2 * _SIGN

    def places(self, area: Box) -> Iterator[tuple[ShardedMatrix, Box]]:
        """The matrices and their outlines in one row. ``area`` gives its top left corner and its height."""
        sizes = ((self.inner, self.rows), (self.columns, self.inner), (self.columns, self.rows))
        left = area.x
        for held, column, (width, height) in zip(self.helds, self.widths, sizes, strict=True):
            yield held, Box(left + (column - width) / 2, area.y + (area.height - height) / 2, width, height)
            left += column + _SIGN

    @property
    def helds(self) -> tuple[ShardedMatrix, ShardedMatrix, ShardedMatrix]:
        """x, w and out."""
        return self.one.x, self.one.w, self.one.out

    def headings(self, left: float, y: float, colours: Palette) -> Iterator[str]:
        """Name, shape and sbp over each matrix."""
        for held, column in zip(self.helds, self.widths, strict=True):
            yield text(left + column / 2, y, title_of(held), bold=True)
            yield text(left + column / 2, y + 15, sbp_line(held), size=11, code=True, fill=colours.muted)
            left += column + _SIGN

    def row(self, rank: int, area: Box, colours: Palette) -> Iterator[str]:
        """One rank's slices of the three matrices, with captions."""
        if rank not in self.one.ranks:
            return
        yield from self.signs(area, colours)
        for index, (held, box) in enumerate(self.places(area)):
            yield from draw_matrix(held, rank, box, role_colour(index, colours), colours)
            words = held.words(rank) if held.layout else ""
            yield text(box.middle[0], box.y + box.height + 15, words, size=11, code=True, fill=colours.muted)

    def signs(self, area: Box, colours: Palette) -> Iterator[str]:
        """The × and = between the matrices."""
        x = area.x + self.widths[0] + _SIGN / 2
        yield text(x, area.middle[1] + 6, "×", size=17, fill=colours.muted)
        yield text(x + self.widths[1] + _SIGN, area.middle[1] + 6, "=", size=17, fill=colours.muted)


def role_colour(index: int, colours: Palette) -> str:
    """Blue for the weight in the middle, grey for the samples on both sides."""
    return colours.stages[0].shades[0] if index == 1 else colours.memory["gradients"]


def draw_matrix(held: ShardedMatrix, rank: int, outline: Box, fill: str, colours: Palette) -> Iterator[str]:
    """The outline of the whole matrix, and in it the slice on ``rank``."""
    yield rect(outline, colours.sunk, colours.strong_line)
    region = held.region(rank)
    if region is None or any(start == stop for start, stop in region):
        return
    box = _inside(region, held, outline)
    yield rect(box, fill, attributes={"class": "held"})
    if held.is_term:
        yield rect(box, f"url(#term-{colours.name})", attributes={"class": "term"})
    yield from _cells(held, region, box, colours)
    yield rect(box, "none", fill)


def _whole(columns: Columns, area: Box, colours: Palette) -> Iterator[str]:
    """The logical product. Dashed lines are cuts, and each slice names the ranks that hold it."""
    yield from columns.signs(area, colours)
    for index, (held, box) in enumerate(columns.places(area)):
        yield rect(box, role_colour(index, colours), colours.strong_line, {"class": "whole"})
        whole = ShardedMatrix(held.name, held.shape, None)
        yield from _cells(whole, tuple((0, size) for size in held.shape), box, colours)
        holders: dict[Region, list[int]] = {}
        for rank in held.ranks if held.layout else ():
            region = held.region(rank)
            if region is not None and all(start < stop for start, stop in region):
                holders.setdefault(region, []).append(rank)
        for region, ranks in holders.items():
            part = _inside(region, held, box)
            if len(holders) > 1:
                yield rect(part, "none", colours.background, {"stroke-width": "2"})
            label = ("+" if held.is_term else ", ").join(map(str, ranks)) if len(ranks) <= 4 else format_ranks(ranks)
            yield from _label(label, part, colours)


def _label(label: str, part: Box, colours: Palette) -> Iterator[str]:
    if part.height >= 16 and part.width >= text_width(label) + 8:
        width = text_width(label) + 8
        x, y = part.middle
        yield rect(Box(x - width / 2, y - 8, width, 16), colours.background, attributes={"rx": "3"})
        yield text(x, y + 4, label, size=11)


def _inside(region: Region, held: ShardedMatrix, outline: Box) -> Box:
    (row, end_row), (column, end_column) = region
    x_scale, y_scale = outline.width / max(1, held.shape[1]), outline.height / max(1, held.shape[0])
    return Box(
        outline.x + column * x_scale,
        outline.y + row * y_scale,
        (end_column - column) * x_scale,
        (end_row - row) * y_scale,
    )


def _cells(held: ShardedMatrix, region: Region, box: Box, colours: Palette) -> Iterator[str]:
    """Lines between the elements of a small matrix."""
    if max(held.shape) > _MOST_CELLS:
        return
    (row, end_row), (column, end_column) = region
    xs = (box.x + box.width * i / (end_column - column) for i in range(1, end_column - column))
    ys = (box.y + box.height * i / (end_row - row) for i in range(1, end_row - row))
    path = "".join(f"M{x:.1f} {box.y:.1f}v{box.height:.1f}" for x in xs)
    path += "".join(f"M{box.x:.1f} {y:.1f}h{box.width:.1f}" for y in ys)
    if path:
        yield f'<path d="{path}" stroke="{colours.background}" stroke-width="0.8" opacity="0.7" fill="none"/>'


def room_of(held: ShardedMatrix, drawn: float) -> float:
    """Pixels across a matrix that is drawn so wide, with room for its title, its sbp and its captions."""
    captions = [text_width(held.words(rank), 11, code=True) for rank in held.ranks]
    return max(drawn, text_width(title_of(held), 13), text_width(sbp_line(held), 11, True), *captions)


def title_of(held: ShardedMatrix) -> str:
    """Name and shape of the drawn matrix."""
    return f"{held.factor} {held.shape[0]} × {held.shape[1]}"


def sbp_line(held: ShardedMatrix) -> str:
    """The sbp. If the matrix is drawn transposed, it is that of the stored tensor, with its name and shape."""
    rows, columns = held.stored
    return f"{held.sbp} of {held.name} {rows} × {columns}" if held.is_turned and held.layout else held.sbp
