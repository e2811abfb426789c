"""Where a strategy puts weights and activations, as layouts of the core: what the panel's pictures are drawn from.

Axes of a stage's placement: (data, model). Nothing here runs anything; a choice says how a layer's weight lies and how
its input has to lie, and the boxing between neighbours follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from workbench.core.boxing import BoxingPlan, plan_boxing
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Sbp, Split, broadcast, partial_sum
from workbench.core.strategy import Layer
from workbench.units import format_ranks

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a layer does: ``parallel`` is ``"data"`` or ``"model"``, ``split`` ``"column"``, ``"row"`` or None."""

    parallel: str
    split: str | None = None
    stage: int = 0

    def __str__(self) -> str:
        split = f":{self.split}" if self.split else ""
        return f"{self.parallel}{split}@{self.stage}"


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks = pipeline stages x data axis x model axis."""

    pipeline: int
    data: int
    model: int

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data * self.model

    def __str__(self) -> str:
        return f"{self.pipeline}x{self.data}x{self.model}"


def stage_placement(degrees: Degrees, stage: int) -> Placement:
    """The stage's ranks as a (data, model) grid; stages are consecutive slices of the ranks."""
    first = stage * degrees.data * degrees.model
    rows = [[first + row * degrees.model + column for column in range(degrees.model)] for row in range(degrees.data)]
    return Placement.of("cpu", rows)


def main_weight(layer: Layer) -> Shape:
    """Shape of the parameter with the most elements: what a row's picture shows. Empty for a layer without any."""
    return max(layer.shapes.values(), key=prod, default=())


def parameter_layout(layer: Layer, choice: Choice, shape: Shape, placement: Placement) -> Layout:
    """How a parameter lies: B on the data axis; on the model axis split where the choice says so.

    column: output features (dim 0; dim 1 of an embedding), biases too; row: input features (dim 1), biases whole.
    """
    entry: Sbp = broadcast
    if choice.split == "column":
        entry = Split(1 if layer.kind == "Embedding" else 0)
    elif choice.split == "row" and len(shape) > 1:
        entry = Split(1)
    return Layout(placement, (broadcast, entry))


def input_layout(choice: Choice, placement: Placement, num_dims: int) -> Layout:
    """How the layer's input has to lie; all later layouts of its activation start from it."""
    if choice.parallel == "data":
        return Layout(placement, (Split(0), Split(0)))
    on_model: Sbp = Split(num_dims - 1) if choice.split == "row" else broadcast
    return Layout(placement, (Split(0), on_model))


def output_layout(choice: Choice, placement: Placement, num_dims: int) -> Layout:
    """How the layer leaves its output."""
    if choice.parallel == "data":
        return Layout(placement, (Split(0), Split(0)))
    by_split: dict[str | None, Sbp] = {"column": Split(num_dims - 1), "row": partial_sum, None: broadcast}
    return Layout(placement, (Split(0), by_split[choice.split]))


@dataclass(frozen=True, slots=True)
class Step:
    """One layer on the way through the model: how its input lies, and the boxings that brought it there, in order."""

    layout: Layout
    boxings: tuple[BoxingPlan, ...]
    bytes_known: bool

    @property
    def wire_bytes(self) -> int:
        """Bytes that its boxings move between ranks."""
        return sum(plan.wire_bytes for plan in self.boxings)


def walk(
    layers: Sequence[Layer], choices: Sequence[Choice], degrees: Degrees, batch_size: int, sample_shape: Shape
) -> list[Step]:
    """The layouts at every layer's input, in the layers' order.

    Boxings have bytes where the activation's shape is known, which is after linear layers on flat samples.
    """
    steps: list[Step] = []
    leaving: Layout | None = None
    shape: Shape = (batch_size, *sample_shape)
    known = len(sample_shape) == 1
    for layer, choice in zip(layers, choices, strict=True):
        wanted = input_layout(choice, stage_placement(degrees, choice.stage), len(shape))
        boxings = _boxings(leaving, wanted, choice, shape) if leaving else ()
        steps.append(Step(wanted, boxings, known))
        leaving = output_layout(choice, wanted.placement, len(shape))
        known = known and layer.kind == "Linear"
        if layer.kind == "Linear":
            shape = (*shape[:-1], main_weight(layer)[0])
    return steps


def _boxings(leaving: Layout, wanted: Layout, choice: Choice, shape: Shape) -> tuple[BoxingPlan, ...]:
    """Boxings from one layer's output to the next one's input. Partial sums are summed where they arise."""
    plans = []
    if leaving.has_partial:
        summed = _end_of_partial(leaving, wanted, choice)
        plans.append(plan_boxing(leaving, summed, shape, itemsize=4))
        leaving = summed
    plans.append(plan_boxing(leaving, wanted, shape, itemsize=4))
    return tuple(plan for plan in plans if plan.kind not in ("none", "relabel"))


def _end_of_partial(leaving: Layout, wanted: Layout, choice: Choice) -> Layout:
    """What a row-split layer's partial sums become: what the next layer wants, S(0) where that is on another stage."""
    if wanted.placement != leaving.placement:
        return leaving.with_sbp((leaving.sbp[0], Split(0)))
    next_is_row = choice.parallel == "model" and choice.split == "row"
    return leaving.with_sbp((leaving.sbp[0], broadcast if next_is_row else wanted.sbp[1]))


def sbp_text(layout: Layout) -> str:
    """The layout's entries on the axes that have more than one rank, ``"S(0), B"``.

    Entries that all say the same are written once; on a single rank everything is ``"B"``.
    """
    entries = [repr(entry) for entry, size in zip(layout.sbp, layout.placement.shape, strict=True) if size > 1]
    return ", ".join(entries if len(set(entries)) > 1 else entries[:1]) or repr(broadcast)


def change_text(plan: BoxingPlan) -> str:
    """What a boxing changes: ``"S(0) \u2192 B"``, or from which ranks to which, ``"0-1 \u2192 2-3"``."""
    source, destination = plan.source, plan.destination
    if source.placement == destination.placement:
        return f"{sbp_text(source)} \u2192 {sbp_text(destination)}"
    ranks = [format_ranks(layout.placement.grid) for layout in (source, destination)]
    return " \u2192 ".join(ranks)
