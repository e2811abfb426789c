"""Draws the products of several layers: each rank's slices, the boxings between layers, and those of gradients.

A pure function: products -> SVG. If a layer's result already has the layout that the next layer needs, both share the
matrix. Otherwise the boxing is drawn between them: its kind, layouts and bytes, and a line for every slice that moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.boxing import describe_sbp_change
from workbench.core.layout import format_sbp
from workbench.theme import Palette, palette
from workbench.ui.pictures.matmul import (
    check_ranks,
    draw_matrix,
    rank_label,
    role_colour,
    room_of,
    sbp_line,
    title_of,
)
from workbench.ui.pictures.matmul_layouts import Plan, Product, ShardedMatrix, backward_of, gradient_sum, joint, product
from workbench.ui.pictures.svg import Box, Picture, arrow, curve, document, lengths, line, rect, text, text_width
from workbench.units import format_bytes

_LONGEST, _SHORTEST = 88.0, 28.0
_LEFT, _TOP, _SIGN, _BOXING, _ROW_GAP = 88.0, 108.0, 30.0, 206.0, 44.0
_BADGE = (164.0, 50.0)
_BADGE_PITCH = 58.0
"""Pixels from the top of a badge to that of the next one below it."""
_BACKWARD = 104.0
Layer = tuple[Any, Any, Any]


def draw_network(
    *layers: Layer, names: Sequence[str] | None = None, backward: bool | None = None, theme: str = "light"
) -> Picture:
    """A picture of several matrix products of live tensors in a row, with the boxings between them.

    Args:
        layers: ``(x, w, out)`` of every layer, in order; see ``wb.draw.matmul``. A layer's ``x`` is the ``out`` of the
            layer before, or a tensor made from it: in another layout, on another placement (the next stage of a
            pipeline), after an activation.
        names: names of the weights. Default: ``w0``, ``w1``, ...
        backward: whether to draw the boxings of gradients. Default: if a weight requires a gradient.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        ValueError: no layer, a layer's ``x`` has another shape than the ``out`` before it, or more than 16 ranks.
        LayoutError: the layout of an ``out`` cannot come from ``x @ w``.

    >>> p = wb.placement(ranks=[0, 1])
    >>> x, w = wb.ones(4, 5, placement=p, sbp="S(0)"), wb.ones(5, 8, placement=p, sbp="B").requires_grad_()
    >>> wb.draw.network((x, w, x @ w))
    layer 0: data parallel on 2 ranks
    gradient of w0: all-reduce P -> B, 320 B
    """
    network = read_network(layers, names)
    shown = any(one.learns for one in network.products) if backward is None else backward
    check_ranks(network.ranks, "wb.draw.network")
    return Picture(_Picture(network, palette(theme)).draw(shown), network_text(network, shown))


@dataclass(frozen=True)
class Network:
    """Products in order; ``joints[i]`` are the boxings between layer i and the next one."""

    products: tuple[Product, ...]
    joints: tuple[tuple[Plan, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all layers."""
        return tuple(sorted({rank for one in self.products for rank in one.ranks}))


def read_network(layers: Sequence[Layer], names: Sequence[str] | None = None) -> Network:
    """The products and the boxings between them."""
    if not layers:
        raise ValueError(
            "wb.draw.network(): 0 layers; give (x, w, out) of at least one, as in wb.draw.network((x, w, x @ w))."
        )
    weights = names or [f"w{i}" for i in range(len(layers))]
    for i, layer in enumerate(layers):
        if not isinstance(layer, (tuple, list)) or len(layer) != 3:
            raise ValueError(
                f"wb.draw.network: layer {i} is a {type(layer).__name__}, not (x, w, out). Give the three tensors of "
                "each layer, as in wb.draw.network((x, w, x @ w))."
            )
    data = ["x", *(f"h{i}" for i in range(1, len(layers))), "out"]
    read = [
        product(*layer, (data[i], weights[i], data[i + 1]), f"wb.draw.network, layer {i}")
        for i, layer in enumerate(layers)
    ]
    for i, (before, after) in enumerate(itertools.pairwise(read)):
        if before.out.shape != after.x.shape:
            raise ValueError(
                f"wb.draw.network: layer {i} gives {before.out.shape} and layer {i + 1} takes {after.x.shape}; a layer "
                "takes what the one before gives. Draw unlike parts in pictures of their own."
            )
    joints = tuple(joint(before.result, after) for before, after in itertools.pairwise(read))
    return Network(tuple(read), joints)


def network_text(network: Network, backward: bool) -> str:
    """The network in words."""
    lines = []
    for i, one in enumerate(network.products):
        lines.append(f"layer {i}: {one.kind}")
        lines += [f"  {name}: {_in_words(plan)}" for name, plan in one.boxings if i == 0 or name == one.w.name]
        if i < len(network.joints):
            lines += [f"  {_in_words(plan)}" for plan in network.joints[i]]
    if backward:
        sums = [(one.w.name, gradient_sum(one)) for one in network.products if one.learns]
        lines += [f"gradient of {name}: {_in_words(plan)}" for name, plan in sums if plan is not None]
        backs = [(one.out.name, plans) for one, plans in zip(network.products, network.joints, strict=False)]
        for name, plans in backs:
            lines += [f"gradient of {name}: {_in_words(back)}" for plan in plans if (back := backward_of(plan))]
    return "\n".join(lines)


def _in_words(plan: Plan) -> str:
    return f"{_kinds(plan)} {_change(plan)}, {format_bytes(plan.wire_bytes)}"


def _kinds(plan: Plan) -> str:
    """The kind of each step of a boxing. A sum on one rank counts as none."""
    return "stays" if _is_nothing(plan) else " + ".join(step.kind for step in plan.steps)


def _change(plan: Plan) -> str:
    return format_sbp(plan.destination.sbp) if _is_nothing(plan) else describe_sbp_change(plan.source, plan.destination)


def _is_nothing(plan: Plan) -> bool:
    placement = plan.destination.placement
    return plan.kind == "none" or (placement == plan.source.placement and placement.num_ranks == 1)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column from ``left`` to ``right``: a matrix (``held``, drawn as large as ``size``), a sign, or boxings."""

    left: float
    right: float
    held: ShardedMatrix | None = None
    size: tuple[float, float] = (0.0, 0.0)
    is_weight: bool = False
    sign: str = ""
    plans: tuple[Plan, ...] = ()
    layer: int = 0

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2


class _Picture:
    def __init__(self, network: Network, colours: Palette) -> None:
        self.network, self.colours, self.ranks = network, colours, network.ranks
        sizes = {"0": network.products[0].x.shape[0], "in": network.products[0].x.shape[1]}
        sizes |= {f"out{i}": one.out.shape[1] for i, one in enumerate(network.products)}
        self.lengths = lengths(sizes, _LONGEST, _SHORTEST)
        self.columns = list(self._arrange())
        self.height = max(column.size[1] for column in self.columns)
        self.row_height = self.height + _ROW_GAP
        self.bottom = _TOP + len(self.ranks) * self.row_height - 8
        self.width = self.columns[-1].right + 30

    def _arrange(self) -> Iterator[_Column]:
        left, inner = _LEFT, self.lengths["in"]
        rows = self.lengths["0"]
        for i, one in enumerate(self.network.products):
            outer = self.lengths[f"out{i}"]
            plans = self.network.joints[i - 1] if i else ()
            if plans:
                yield _Column(left, left + _BOXING, plans=plans, layer=i)
                left += _BOXING
            matrices = ((one.x, (inner, rows)), (one.w, (outer, inner)), (one.out, (outer, rows)))
            for index, (held, size) in enumerate(matrices):
                if index or (i and not plans):
                    if index == 0:
                        continue
                    yield _Column(left, left + _SIGN, sign="×" if index == 1 else "=", layer=i)
                    left += _SIGN
                column = _Column(left, left + room_of(held, size[0]), held, size, index == 1, layer=i)
                yield column
                left = column.right
            inner = outer

    def draw(self, backward: bool) -> str:
        parts = [*self._headings()]
        for column in self.columns:
            parts += self._lines(column)
        for index, rank in enumerate(self.ranks):
            top = self._top(index)
            if index:
                y = top - _ROW_GAP / 2 + 10
                parts.append(line((16, y), (self.width - 16, y), self.colours.line, dashed=True))
            one = next(one for one in self.network.products if rank in one.ranks)
            if one.out.layout:
                parts += rank_label(one, rank, top + self.height / 2, self.colours)
            parts += [part for column in self.columns for part in self._cell(column, rank, top)]
        for column in self.columns:
            parts += self._boxing(column)
        bottom = self.bottom
        if backward and any(layout is not None for layout in (one.out.layout for one in self.network.products)):
            parts += self._backward()
            most = max(1, *(len(_gradient_boxings(column)) for column in self.columns))
            bottom += _BACKWARD + (most - 1) * _BADGE_PITCH
        return document((self.width, bottom), network_text(self.network, backward), self.colours, parts)

    def _top(self, index: int) -> float:
        return _TOP + index * self.row_height

    def _headings(self) -> Iterator[str]:
        for i, one in enumerate(self.network.products):
            mine = [column for column in self.columns if column.layer == i and not column.plans]
            left, right = mine[0].left, mine[-1].right
            yield text((left + right) / 2, 26, f"layer {i}", size=14, bold=True)
            yield text((left + right) / 2, 42, one.kind, fill=self.colours.muted)
            yield line((left + 8 * bool(i), 50), (right, 50), self.colours.strong_line)
        for column in self.columns:
            if column.held:
                yield text(column.middle, 70, title_of(column.held), bold=True)
                yield text(column.middle, 85, sbp_line(column.held), size=11, code=True, fill=self.colours.muted)

    def _cell(self, column: _Column, rank: int, top: float) -> Iterator[str]:
        held = column.held
        if rank not in (self.network.products[column.layer].ranks):
            return
        if column.sign:
            yield text(column.middle, top + self.height / 2 + 6, column.sign, size=16, fill=self.colours.muted)
        if held is None:
            return
        box = self._place(column, top)
        yield from draw_matrix(held, rank, box, role_colour(1 if column.is_weight else 0, self.colours), self.colours)
        if held.layout:
            words = held.words(rank)
            yield text(column.middle, box.y + box.height + 14, words, size=11, code=True, fill=self.colours.muted)

    def _place(self, column: _Column, top: float) -> Box:
        width, height = column.size
        return Box(column.middle - width / 2, top + (self.height - height) / 2, width, height)

    def _lines(self, column: _Column) -> Iterator[str]:
        """One line from each sending rank to each receiving rank. Grey if a rank keeps its own slice."""
        if not column.plans:
            return
        pairs = {(rank, rank) for rank in self.ranks}
        for plan in column.plans:
            for step in plan.steps:
                pairs |= {(move.source, move.destination) for move in step.moves}
        first, last = column.plans[0].source.placement, column.plans[-1].destination.placement
        x, to_x = column.left + 4, column.right - 4
        for source, destination in sorted(pairs):
            if source in first and destination in last:
                y, to_y = (self._top(self.ranks.index(rank)) + self.height / 2 for rank in (source, destination))
                stays = source == destination
                stroke = self.colours.strong_line if stays else self.colours.boxing
                yield curve((x, y), (to_x - 6, to_y), stroke)
                yield f'<path d="M{to_x:.1f} {to_y:.1f}l-6 -3.5v7z" fill="{stroke}"/>'

    def _boxing(self, column: _Column) -> Iterator[str]:
        if not column.plans:
            return
        middle = (self._top(0) + self._top(len(self.ranks) - 1) + self.height) / 2
        tall = (len(column.plans) - 1) * _BADGE_PITCH + _BADGE[1]
        for number, plan in enumerate(column.plans):
            yield from _badge(column.middle, middle - tall / 2 + number * _BADGE_PITCH, plan, self.colours)
        yield text(column.middle, 42, "boxing", fill=self.colours.boxing, bold=True)

    def _backward(self) -> Iterator[str]:
        y = self.bottom + 6
        yield line((16, y - 8), (self.width - 16, y - 8), self.colours.strong_line)
        yield text(16, y + 14, "backward", anchor="start", bold=True)
        yield from arrow((self.width - 30, y + 10), (_LEFT, y + 10), self.colours.strong_line)
        for column in self.columns:
            one = self.network.products[column.layer]
            if column.is_weight and one.learns:
                plan = gradient_sum(one)
                if plan is not None:
                    yield from self._gradient(column.middle, y, f"gradient of {one.w.name}", plan)
            if backs := _gradient_boxings(column):
                name = self.network.products[column.layer - 1].out.name
                yield from self._gradient(column.middle, y, f"gradient of {name}", *backs)

    def _gradient(self, x: float, y: float, title: str, *plans: Plan) -> Iterator[str]:
        room = text_width(title, 12) + 10
        yield rect(Box(x - room / 2, y, room, 18), self.colours.background)
        yield text(x, y + 14, title)
        for number, plan in enumerate(plans):
            yield from _badge(x, y + 24 + number * _BADGE_PITCH, plan, self.colours)


def _gradient_boxings(column: _Column) -> list[Plan]:
    """The boxings of the gradient of the result between two layers."""
    return [back for plan in column.plans if (back := backward_of(plan)) is not None]


def _badge(x: float, y: float, plan: Plan, colours: Palette) -> Iterator[str]:
    """Kind, layouts and bytes of a boxing, in a box. Grey if no data moves."""
    free = plan.wire_bytes == 0
    width, height = _BADGE
    fill, edge = (colours.sunk, colours.strong_line) if free else (colours.boxing_tint, colours.boxing)
    yield rect(Box(x - width / 2, y, width, height), fill, edge, {"rx": "4", "class": "boxing"})
    yield text(x, y + 20, f"{_kinds(plan)}, {format_bytes(plan.wire_bytes)}", bold=True)
    yield text(x, y + 38, _change(plan).replace("->", "→"), size=11, code=True)
