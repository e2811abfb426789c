"""The boxing column of the grid: the layout of activations after each row, and the boxing to the next row.

A badge stands on the boundary of the two rows of its boxing. If a row stands for several layers, its note counts the
boxings inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from workbench.core.boxing import BoxingPlan
from workbench.core.boxing_path import BoxingPath
from workbench.core.layer_extents import LayerExtents
from workbench.core.layer_plan import LayerEdge, LayerPlan, wire_bytes
from workbench.core.layout import Layout
from workbench.core.sbp import broadcast
from workbench.core.sharding_plan import ShardingPlan
from workbench.core.strategy import ResolvedStrategy
from workbench.cost.estimate import SentBytes
from workbench.ui.number_text import TIMES
from workbench.ui.strategy.grouping import Node
from workbench.units import format_bytes, format_ranks

ARROW = "\u2192"
_MAX_DESCRIBED_RANKS = 16
_LONGEST_RANKS = 1


@dataclass(frozen=True)
class StepBoxings:
    """The boxings of one step under one strategy.

    Attributes:
        plan: of the strategy.
        layers: the plan of each layer, for one micro-batch.
    """

    plan: ShardingPlan
    layers: Sequence[LayerPlan]

    @cached_property
    def layer_edges(self) -> list[LayerEdge]:
        """By layer, the boxings between the layer before and it."""
        before = [LayerEdge(), *(layer.boxes_output for layer in self.layers)]
        return [out + layer.boxes_input for out, layer in zip(before, self.layers, strict=False)]

    @property
    def num_micro_batches(self) -> int:
        """Of a step; each does all of these boxings."""
        return self.plan.resolved.num_micro_batches

    @cached_property
    def gradient_bytes(self) -> list[int]:
        """By layer, bytes on the wire in a step, all ranks together; under ZeRO, with those of its weights."""
        return [self.plan.gradient_bytes(layer) for layer in self.layers]

    @property
    def bytes_per_micro_batch(self) -> int:
        """Bytes of activations and their gradients, all ranks together."""
        return sum(edge.forward_bytes + edge.backward_bytes for edge in self.layer_edges)

    @property
    def bytes_known(self) -> bool:
        """Whether the shape of every boxed tensor is known."""
        return all(edge.is_known for edge in self.layer_edges if edge.plans)


def boxings_of(plan: ShardingPlan, extents: Sequence[LayerExtents], batch_size: int) -> StepBoxings:
    """The boxings of a step. ``extents`` are the sizes of all layers' inputs and outputs."""
    micro_batch = max(batch_size // plan.resolved.num_micro_batches, 1)
    itemsize = 4 if plan.resolved.options.precision == "fp32" else 2
    return StepBoxings(plan, plan.layers_of(extents, micro_batch, itemsize))


def boxing_view(
    node: Node, boxings: StepBoxings, *, is_open: bool | None = None, is_first_below: bool = False
) -> dict[str, Any]:
    """The content of the boxing column at a row: layout, note, and the badge on the boundary above it.

    Args:
        is_open: whether the rows below it are visible. They then have the notes and badges of the layers inside.
        is_first_below: whether it is the first row below an open one, which has the badge.
    """
    first, last = boxings.layers[node.first[0]], boxings.layers[node.first[-1]]
    entering = boxings.layer_edges[node.first[0]]
    layout = first.input_layout if is_open else last.output_layout
    axes = boxings.plan.axes_of(node.first[0] if is_open else node.first[-1])
    gradients = sum(boxings.gradient_bytes[index] for index in node.layers)
    what = "grads + weights" if boxings.plan.resolved.options.zero else "grad sum"
    note = f"{what} {format_bytes(gradients)} per step" if gradients else ""
    return {
        "layout": sbp_text(layout),
        "layout_tip": f"activation {full_text(layout, axes)}, ranks {format_ranks(layout.placement.grid)}",
        "note": "" if is_open else _inside(node, boxings) or note,
        "boxing": badge(entering) if entering.plans and not is_first_below else None,
    }


def _inside(node: Node, boxings: StepBoxings) -> str:
    """The boxings inside a folded row: ``"8 x all-reduce inside, 33.6 MB"``."""
    if len(node.first) == 1 and node.copies > 1 and not node.blocks:
        return ""  # one layer of each of several blocks: they are not neighbours
    edges = [boxings.layer_edges[index] for index in node.layers[1:]]
    kinds = Counter(plan.kind for edge in edges for plan in edge.plans)
    if not kinds:
        return ""
    what = next(iter(kinds)) if len(kinds) == 1 else "boxings"
    return f"{kinds.total()} {TIMES} {what} inside{_size_of(edges)}"


def between_blocks(node: Node, boxings: StepBoxings) -> str:
    """The boxings between equal blocks: ``"all-reduce between blocks, 4.2 MB"``; empty if there are none."""
    if node.copies == 1:
        return ""
    edge = boxings.layer_edges[node.layers[len(node.first)]]
    kinds = " + ".join(plan.kind for plan in edge.plans)
    return f"{kinds} between blocks{_size_of([edge])}" if kinds else ""


def _size_of(edges: Sequence[LayerEdge]) -> str:
    if not all(edge.is_known for edge in edges if edge.plans):
        return ""
    return f", {format_bytes(sum(edge.forward_bytes + edge.backward_bytes for edge in edges))}"


def badge(edge: LayerEdge) -> dict[str, Any]:
    """The boxings before a layer as one badge, with the whole plan as its tooltip."""
    plans = edge.plans
    known = edge.is_known
    return {
        "change": change_text(plans[0].source, plans[-1].destination),
        "kind": " + ".join(sorted(dict.fromkeys(plan.kind for plan in plans), key=lambda kind: kind != "send")),
        "bytes": _bytes_both_ways(edge.forward_bytes, edge.backward_bytes) if known else "",
        "free": known and edge.forward_bytes + edge.backward_bytes == 0,
        "title": _plan_text(plans) if known else "the shape of this activation is not known",
    }


def _bytes_both_ways(forward: int, back: int) -> str:
    """Bytes of a boxing and of its gradient: ``"5.12 + 5.12 kB"``."""
    there, unit = format_bytes(forward).split(" ")
    again, other_unit = format_bytes(back).split(" ")
    return f"{there} + {again} {unit}" if unit == other_unit else f"{there} {unit} + {again} {other_unit}"


@lru_cache(maxsize=1024)
def _plan_text(plans: tuple[BoxingPlan | BoxingPath, ...]) -> str:
    """The plans as text; for many ranks only the totals, because the list of moves would be too long."""
    ranks = {rank for plan in plans for rank in (*plan.source.placement, *plan.destination.placement)}
    if len(ranks) <= _MAX_DESCRIBED_RANKS:
        return "\n".join(plan.describe(max_moves=8) for plan in plans)
    lines = []
    for plan in plans:
        what = f"{change_text(plan.source, plan.destination)}: {plan.kind} of {tuple(plan.shape)}"
        most = format_bytes(max(plan.bytes_received.values(), default=0))
        lines.append(f"{what}, {format_bytes(wire_bytes(plan))} on the wire, at most {most} for a rank")
    return "\n".join(lines)


@lru_cache(maxsize=4096)
def sbp_text(layout: Layout) -> str:
    """The layout's entry on the model axis, or on the data axis if that has all ranks: ``"S(1)"``.

    On the data axis weights are always B and activations S(0), so the other entry shows the difference; ``full_text``
    has both. On a single rank everything is ``"B"``.
    """
    entries = [repr(entry) for entry, size in zip(layout.sbp, layout.placement.shape, strict=True) if size > 1]
    return entries[-1] if entries else repr(broadcast)


def full_text(layout: Layout, axes: Sequence[str]) -> str:
    """All entries, by axis: ``"S(0) on the data axis, B on the model axis"``."""
    if len(axes) < len(layout.sbp):  # experts over a part of the data axis
        axes = [axes[0], f"groups of the {axes[0]}", *axes[1:]]
    elif len(axes) > len(layout.sbp):  # experts lie over the ranks of data and context alike
        axes = [axis for axis in axes if axis != "context"][: len(layout.sbp)]
    entries = zip(layout.sbp, axes, layout.placement.shape, strict=True)
    return ", ".join(f"{entry!r} on the {axis} axis" for entry, axis, size in entries if size > 1) or "on one rank"


def change_text(source: Layout, destination: Layout) -> str:
    """The change by boxings: ``"S(0) -> B"``; between stages, if it is short, with the ranks: ``"B@0 -> B@1"``."""
    if source.placement == destination.placement:
        return f"{sbp_text(source)} {ARROW} {sbp_text(destination)}"
    ranks = [format_ranks(layout.placement.grid) for layout in (source, destination)]
    named = [f"@{text}" if max(map(len, ranks)) <= _LONGEST_RANKS else "" for text in ranks]
    return f" {ARROW} ".join(f"{sbp_text(a)}{name}" for a, name in zip((source, destination), named, strict=True))


@dataclass(frozen=True)
class End:
    """The boxing between the last layer and the loss: the layout there, its badge, and its bytes."""

    layout: str
    boxing: dict[str, Any] | None = None
    num_bytes: int = 0


def end_of(boxings: StepBoxings, resolved: ResolvedStrategy, is_cross_entropy: bool) -> End:
    """The loss after the last layer. With split classes, ranks exchange a few numbers per row instead of logits.

    It counts the exchanges of CPUs: a maximum and three sums, and their gradients. The kernel for GPUs has three.
    """
    last, choice = boxings.layers[-1], resolved.layers[-1]
    edge, shape = last.boxes_output, last.output_shape
    if edge.plans and edge.is_known:
        return End(sbp_text(last.boxed_layout), badge(edge), edge.forward_bytes + edge.backward_bytes)
    if choice.split == "column" and is_cross_entropy and shape is not None:
        _, model = resolved.stage_width(choice.stage)
        one_each = 4 * prod(shape[:-1]) * model * (model - 1)
        boxing = {
            "change": f"{sbp_text(last.output_layout)} {ARROW} S(0)",
            "kind": "all-reduce",
            "bytes": _bytes_both_ways(4 * one_each, 3 * one_each),
            "free": False,
            "title": "classes are split: of every row its maximum and three sums are exchanged, not the logits",
        }
        return End("S(0)", boxing, 7 * one_each)
    return End(sbp_text(last.boxed_layout))


def total_text(
    boxings: StepBoxings,
    end: End | None,
    sent: SentBytes | None = None,
    is_counted: bool = False,
    problem: str = "",
) -> tuple[str, str]:
    """Bytes sent in a step, and their sum in words: ``("596 MB", "4 x 147 MB activations + 8.9 MB gradients")``.

    Without ``sent``, they are those of the boxings between rows. What is not counted is "about" so many.
    ``problem`` says why shapes are unknown.
    """
    what = "gradients and weights" if boxings.plan.resolved.options.zero else "gradients"
    m, between = boxings.num_micro_batches, boxings.bytes_per_micro_batch + (end.num_bytes if end is not None else 0)
    if sent is None:
        sent = SentBytes(m * between, sum(boxings.gradient_bytes))
        if not boxings.bytes_known:
            unknown = "shapes of activations are not known" + (f": {problem}" if problem else "")
            return f"{format_bytes(sent.weights)} of {what}", unknown
    count = f"{m} {TIMES} " if m > 1 else ""
    beside = round(sent.activations / m) - between
    skips = f" ({format_bytes(beside)} of it beside the rows)" if beside > 0 and boxings.bytes_known else ""
    activations, about = round(sent.activations / m), "" if is_counted else "about "
    parts = f"{count}{format_bytes(activations)} activations{skips} + {format_bytes(round(sent.weights))} {what}"
    return f"{about}{format_bytes(round(sent.total))}", parts
