"""Rows of the grid: layers, and equal blocks folded into one row. Names and choices in, a tree of rows out.

A row knows its layers and a pattern that covers them, so that an edit of a row is an edit of a strategy.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from workbench.core.presets import block_of
from workbench.core.rows import Layer, quoted, range_of
from workbench.ui.number_text import TIMES

_SINGLES_WORTH_FOLDING = 4
_SEGMENTS_WORTH_A_HEAD = 3
_OWN = "(own)"


@dataclass(frozen=True)
class Node:
    """One row: a layer, or ``copies`` equal blocks with the layers of one block below it.

    Attributes:
        pattern: covers exactly ``layers``, unless a layer has layers below it.
        label: the row's name under its head.
        layers: indices of all layers that the row stands for.
        copies: the number of equal blocks.
        blocks: their paths. Unfolded rows are remembered by paths, which stay the same in another cut into rows.
        is_own: whether it is a module's own parameters, without those of the layers below it.
    """

    pattern: str
    label: str
    layers: tuple[int, ...]
    copies: int = 1
    blocks: tuple[str, ...] = ()
    children: tuple[Node, ...] = ()
    is_own: bool = False

    @property
    def identity(self) -> str:
        """The pattern; another name where that of the module above its layers is the same."""
        return f"{self.pattern} {_OWN}" if self.is_own else self.pattern

    @property
    def first(self) -> tuple[int, ...]:
        """Layers of the first of the equal blocks; the others are like them."""
        return self.layers[: len(self.layers) // self.copies]


@dataclass(frozen=True)
class Row:
    """A visible node: its depth, and whether the rows below it are visible (None: it has none)."""

    node: Node
    depth: int = 0
    unfolded: bool | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    """A numbered module and its layers."""

    path: str
    layers: tuple[int, ...]

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def number(self) -> str:
        return self.path.rpartition(".")[2]


def tree(layers: Sequence[Layer], choices: Sequence[Any]) -> list[Node]:
    """The rows of a model: runs of equal blocks are cut where the choices of their layers change.

    Args:
        layers: in the order of the forward.
        choices: the choice of each layer; only compared with one another.
    """
    nodes: list[Node] = []
    blocks = [_Block(path, tuple(indices)) for path, indices in _by_block(layers)]
    for _, group in groupby(blocks, key=lambda block: _group_key(block, layers)):
        alike = list(group)
        if len(alike[0].layers) == 1 and len(alike) < _SINGLES_WORTH_FOLDING:
            nodes += [_leaf(layers, index) for block in alike for index in block.layers]
        else:
            nodes += _runs(alike, layers, choices)
    return nodes


def _by_block(layers: Sequence[Layer]) -> Iterator[tuple[str, list[int]]]:
    for path, group in groupby(range(len(layers)), key=lambda index: block_of(layers[index].name)):
        yield path, list(group)


def _group_key(block: _Block, layers: Sequence[Layer]) -> tuple[Any, ...]:
    """A key that is equal for blocks of one parent with the same layers, and unique for a layer outside of blocks."""
    if not block.number.isdecimal():
        return (block.path,)
    shapes = tuple(
        (layers[i].name.removeprefix(block.path), layers[i].kind, tuple(layers[i].shapes.items())) for i in block.layers
    )
    return (block.parent, shapes)


def _runs(blocks: Sequence[_Block], layers: Sequence[Layer], choices: Sequence[Any]) -> list[Node]:
    """Equal blocks as one row per stretch of equal choices, under a head if there are many stretches.

    Blocks whose names are no range are rows of their own.
    """
    nodes: list[Node] = []
    for _, group in groupby(blocks, key=lambda block: [choices[i] for i in block.layers]):
        stretch = list(group)
        node = _segment(stretch, layers)
        nodes += [node] if node else [one for block in stretch if (one := _segment([block], layers))]
    found = _range(blocks, layers)
    if len(nodes) < _SEGMENTS_WORTH_A_HEAD or found is None:
        return nodes
    head = Node(
        *found,
        tuple(i for block in blocks for i in block.layers),
        len(blocks),
        (f"{blocks[0].parent}.*",),
        tuple(nodes),
    )
    return [head]


def _segment(blocks: Sequence[_Block], layers: Sequence[Layer]) -> Node | None:
    found = _range(blocks, layers)
    if found is None:
        return None
    pattern, label = found
    first = blocks[0]
    children: list[Node] = []
    if len(first.layers) > 1:
        for place, index in enumerate(first.layers):
            name = layers[index].name.removeprefix(first.path)
            below = tuple(block.layers[place] for block in blocks)
            children.append(Node(pattern + quoted(name), name[1:] or _OWN, below, len(blocks), is_own=not name))
    indices = tuple(i for block in blocks for i in block.layers)
    return Node(pattern, label, indices, len(blocks), tuple(block.path for block in blocks), tuple(children))


def _range(blocks: Sequence[_Block], layers: Sequence[Layer]) -> tuple[str, str] | None:
    """Pattern and label of neighbouring blocks: ``("blocks.[0-3]", "blocks.0-3 x4")``; None if no range is theirs."""
    first, last = blocks[0], blocks[-1]
    if len(blocks) == 1:
        return quoted(first.path), first.path
    prefix = f"{first.parent}." if first.parent else ""
    below = (layer.name.removeprefix(prefix) for layer in layers if layer.name.startswith(prefix))
    found = range_of([block.number for block in blocks], [name.partition(".")[0] for name in below])
    if found is None:
        return None
    return quoted(prefix) + found, f"{prefix}{first.number}-{last.number} {TIMES}{len(blocks)}"


def _leaf(layers: Sequence[Layer], index: int, is_own: bool = False) -> Node:
    name = layers[index].name
    return Node(quoted(name), f"{name} {_OWN}" if is_own else name, (index,), is_own=is_own)


def visible(nodes: Sequence[Node], unfolded: Collection[str], depth: int = 0) -> list[Row]:
    """The visible rows, from the top. Rows below a row are visible if one of its blocks is in ``unfolded``.

    Heads of cut runs (``"blocks.*"``) are reversed: they are folded if they are in it.
    """
    rows: list[Row] = []
    for node in nodes:
        is_open = is_unfolded(node, unfolded) if node.children else None
        rows.append(Row(node, depth, is_open))
        if is_open:
            rows += visible(node.children, unfolded, depth + 1)
    return rows


def is_unfolded(node: Node, unfolded: Collection[str]) -> bool:
    """Whether the rows below a row are visible."""
    if _is_head(node):
        return node.blocks[0] not in unfolded
    return any(block in unfolded for block in node.blocks)


def fold(node: Node, unfolded: Collection[str]) -> set[str]:
    """The unfolded blocks after a click on the row's triangle."""
    marks = set(node.blocks)
    is_marked = is_unfolded(node, unfolded) is not _is_head(node)
    return set(unfolded) - marks if is_marked else set(unfolded) | marks


def _is_head(node: Node) -> bool:
    return len(node.blocks) == 1 and node.blocks[0].endswith(".*")


def find(layers: Sequence[Layer], text: str) -> list[Row]:
    """Single layers whose names contain ``text`` or match it as a glob, so that one of many equal blocks can be set.
    Capitals do not matter.

    >>> [row.node.label for row in find([Layer("blocks.3.fc", "Linear"), Layer("head", "Linear")], "blocks.*")]
    ['blocks.3.fc']
    """
    wanted = text.strip()
    has_wildcards = any(letter in wanted for letter in "*?[")
    pattern = (wanted if has_wildcards else f"*{wanted}*").lower()
    blocks = {block_of(layer.name) for layer in layers if block_of(layer.name) != layer.name}
    found = [index for index, layer in enumerate(layers) if fnmatch.fnmatchcase(layer.name.lower(), pattern)]
    return [Row(_leaf(layers, index, is_own=layers[index].name in blocks)) for index in found]


def walk(nodes: Sequence[Node]) -> Iterator[Node]:
    """All rows, visible or not."""
    for node in nodes:
        yield node
        yield from walk(node.children)
