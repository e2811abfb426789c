"""Layouts of activations between layers, and the boxings that bring them: what panel, cost model and tables share.

The model is read as a chain, as a strategy is: what leaves a layer enters the next one. A residual beside the chain has
the layout of what it is added to. Doors are those of ``runtime.strategies``: sums of row-split layers and columns of
tables are boxed where they arise, to what the next layer expects.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from workbench.core.boxing import BoxingPlan, plan_boxing
from workbench.core.layout import Layout
from workbench.core.pairing import TABLE, TRANSPOSED_KINDS, feature_dim
from workbench.core.placement import Placement
from workbench.core.rows import Layer
from workbench.core.sbp import Sbp, Split, broadcast, dual, partial_sum
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy

Shape = tuple[int, ...]
_USUAL_DIMS = 2
_LINEAR = ("Linear", "NonDynamicallyQuantizableLinear", *TRANSPOSED_KINDS)


@dataclass(frozen=True)
class Crossing:
    """One layer on the way through the model.

    Attributes:
        enters: layout that the layer's input has to have.
        leaves: layout of its output as its function gives it: P behind a row-split layer.
        shape: logical shape of the input, batch first; None where it is not known, and nothing is said about bytes.
        plans: the boxings, in order, from what the layer before leaves to ``enters``; none at the first layer.
        itemsize: bytes of an element.
    """

    enters: Layout
    leaves: Layout
    shape: Shape | None
    plans: tuple[BoxingPlan, ...] = ()
    itemsize: int = 4

    @cached_property
    def back(self) -> tuple[BoxingPlan, ...]:
        """The boxings of the gradient, which goes the other way and has the dual layouts."""
        return tuple(
            plan_boxing(_dual(plan.destination), _dual(plan.source), plan.shape, plan.itemsize)
            for plan in reversed(self.plans)
        )

    @property
    def bytes_forward(self) -> int:
        """On the wire, all ranks together, of one micro-batch."""
        return sum(map(wire_bytes, self.plans)) if self.shape else 0

    @property
    def bytes_back(self) -> int:
        """The same of the gradient."""
        return sum(map(wire_bytes, self.back)) if self.shape else 0


@lru_cache(maxsize=4096)
def wire_bytes(plan: BoxingPlan) -> int:
    """All that ranks receive from one another: what they send, counted without a list of moves."""
    return sum(plan.bytes_received.values())


class Stages:
    """Placements of a strategy's stages as (data, model) grids, and the layouts that layers have on them."""

    def __init__(self, resolved: ResolvedStrategy) -> None:
        self.resolved = resolved
        self.placements = tuple(Placement.of("cpu", resolved.stage_grid(stage)) for stage in range(resolved.num_stages))

    def layout(self, stage: int, data: Sbp, model: Sbp) -> Layout:
        """Axes of one rank say nothing: they are B."""
        placement = self.placements[stage]
        entries = (entry if size > 1 else broadcast for entry, size in zip((data, model), placement.shape, strict=True))
        return Layout(placement, tuple(entries))

    def parameter(self, layer: Layer, choice: ResolvedLayer, shape: Shape) -> Layout:
        """How a parameter of a layer lies. By columns: output features, biases too; by rows: input features."""
        outputs_last = layer.kind in (TABLE, *TRANSPOSED_KINDS)
        entry: Sbp = broadcast
        if choice.split == "column":
            entry = Split(len(shape) - 1 if outputs_last else 0)
        elif choice.split == "row" and len(shape) > 1:
            entry = Split(0 if outputs_last else 1)
        return self.layout(choice.stage, broadcast, entry)

    def enters(self, choice: ResolvedLayer, num_dims: int) -> Layout:
        """How a layer's input has to lie."""
        if choice.parallel == "data":
            return self.layout(choice.stage, Split(0), Split(0))
        if self.resolved.options.sequence and "Norm" in choice.kind and num_dims > 2:
            return self.layout(choice.stage, Split(0), Split(1))
        takes_slices = choice.split == "row" and choice.kind != TABLE
        return self.layout(
            choice.stage, Split(0), Split(feature_dim(choice.kind, num_dims)) if takes_slices else broadcast
        )

    def leaves(self, choice: ResolvedLayer, num_dims: int) -> Layout:
        """How a layer's function leaves its output."""
        if choice.split is None:
            return self.enters(choice, num_dims)
        model: Sbp = Split(feature_dim(choice.kind, num_dims)) if choice.split == "column" else partial_sum
        return self.layout(choice.stage, Split(0), model)

    def behind_door(
        self, choice: ResolvedLayer, following: ResolvedLayer | None, leaves: Layout, num_dims: int
    ) -> Layout:
        """Where sums and columns of a table go at once; other outputs stay as they are."""
        if choice.split is None or (choice.split == "column" and choice.kind != TABLE):
            return leaves
        if self.resolved.options.sequence and num_dims > 2:
            wanted = self.layout(choice.stage, Split(0), Split(1))
        elif following is None or following.stage != choice.stage:
            wanted = self.layout(choice.stage, Split(0), Split(0))
        elif following.split == "row":
            wanted = self.layout(choice.stage, Split(0), broadcast)
        else:
            wanted = self.enters(following, num_dims)
        return leaves.with_sbp((leaves.sbp[0], wanted.sbp[1]))


def crossings(
    layers: Sequence[Layer],
    resolved: ResolvedStrategy,
    shapes: Sequence[Shape | None],
    micro_batch: int,
    *,
    sample_shape: Shape | None = None,
    itemsize: int = 4,
) -> list[Crossing]:
    """The way through the model, layer by layer.

    Args:
        layers: in the order of the forward.
        resolved: what each of them does.
        shapes: of the output of each layer, of one sample; None where it is not known (see ``known_shapes``).
        micro_batch: samples per micro-batch, all ranks together.
        sample_shape: of one sample of the model's input.
        itemsize: bytes of an element of an activation.

    >>> from workbench.core.strategy import Strategy
    >>> layers = [Layer("fc1", "Linear", {"weight": (8, 4)}), Layer("fc2", "Linear", {"weight": (2, 8)})]
    >>> resolved = Strategy("fc1: data; fc2: model").resolve(layers, num_ranks=2)
    >>> [plan.kind for plan in crossings(layers, resolved, [(8,), (2,)], 16)[1].plans]
    ['all-gather']
    """
    stages = Stages(resolved)
    found: list[Crossing] = []
    arriving = sample_shape
    for index, (layer, choice) in enumerate(zip(layers, resolved.layers, strict=True)):
        sizes = _input_sizes(layer, arriving)
        num_dims = len(sizes) + 1 if sizes is not None else _USUAL_DIMS
        enters = stages.enters(choice, num_dims)
        whole = (micro_batch, *sizes) if sizes is not None else None
        plans: tuple[BoxingPlan, ...] = ()
        if index:
            left = found[-1].leaves
            door = stages.behind_door(resolved.layers[index - 1], choice, left, num_dims)
            way = (left, door) if layer.kind == TABLE else (left, door, enters)  # tables take ids, not what is before
            plans = _plans(way, whole or (micro_batch,) * num_dims, itemsize)
        arriving = shapes[index]
        num_dims = len(arriving) + 1 if arriving is not None else num_dims
        found.append(Crossing(enters, stages.leaves(choice, num_dims), whole, plans, itemsize))
    return found


def known_shapes(layers: Sequence[Layer], sample_shape: Shape | None) -> list[Shape | None]:
    """Output shapes of one sample as far as linear layers on flat samples tell them; the rest is None."""
    arriving = sample_shape if sample_shape is not None and len(sample_shape) == 1 else None
    shapes: list[Shape | None] = []
    for layer in layers:
        arriving = (layer.shapes["weight"][0],) if arriving and layer.kind == "Linear" else None
        shapes.append(arriving)
    return shapes


def _input_sizes(layer: Layer, arriving: Shape | None) -> Shape | None:
    """What a layer takes: what the one before leaves, with its own number of features where that says one."""
    if not arriving or layer.kind not in _LINEAR or "weight" not in layer.shapes:
        return arriving
    return (*arriving[:-1], layer.shapes["weight"][0 if layer.kind in TRANSPOSED_KINDS else 1])


def _plans(route: Sequence[Layout], shape: Shape, itemsize: int) -> tuple[BoxingPlan, ...]:
    """The boxings along a route, without those that change nothing."""
    plans = (plan_boxing(a, b, shape, itemsize) for a, b in itertools.pairwise(route) if a != b)
    return tuple(plan for plan in plans if plan.kind not in ("none", "relabel"))


def _dual(layout: Layout) -> Layout:
    """The layout of the gradient; along axes of one rank nothing changes."""
    entries = zip(layout.sbp, layout.placement.shape, strict=True)
    return layout.with_sbp(tuple(dual(entry) if size > 1 else entry for entry, size in entries))


__all__ = ["Crossing", "Stages", "crossings", "known_shapes", "wire_bytes"]
