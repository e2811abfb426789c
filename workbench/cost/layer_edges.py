"""Layouts of activations between layers, and the boxings that bring them: what panel, cost model and tables share.

The model is read as a chain, as a strategy is: what leaves a layer enters the next one. A residual beside the chain has
the layout of what it is added to. Doors are those of ``runtime.strategies``: sums of row-split layers and columns of
tables are boxed where they arise, to what the next layer expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import cast

from workbench.core.boxing import BoxingPlan, plan_boxing
from workbench.core.layout import Layout
from workbench.core.model_costs import Extent, LayerCost
from workbench.core.placement import Placement
from workbench.core.rows import Layer
from workbench.core.sbp import Sbp, Split, broadcast, dual, partial_sum
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.core.weight_splits import TABLE, TRANSPOSED_KINDS, feature_dim

Shape = tuple[int, ...]
_UNKNOWN = Extent((1,))
"""Of what nobody knows: layouts are said of it as of a matrix, and nothing about bytes."""
_LINEAR = ("Linear", "NonDynamicallyQuantizableLinear", *TRANSPOSED_KINDS)


@dataclass(frozen=True, slots=True)
class LayerExtents:
    """What passes through a layer: how large its input and its output are; None where that is not known."""

    input: Extent | None = None
    output: Extent | None = None


@dataclass(frozen=True)
class LayerEdge:
    """One layer on the way through the model.

    Attributes:
        enters: layout that the layer's input has to have.
        leaves: layout of its output as its function gives it: P behind a row-split layer.
        shape: logical shape of the input; None where sizes are not known, and nothing is said about bytes.
        plans: the boxings, in order, from what the layer before leaves to ``enters``; none at the first layer.
        itemsize: bytes of an element.
    """

    input_layout: Layout
    output_layout: Layout
    shape: Shape | None
    plans: tuple[BoxingPlan, ...] = ()
    itemsize: int = 4

    @cached_property
    def backward_plans(self) -> tuple[BoxingPlan, ...]:
        """The boxings of the gradient, which goes the other way and has the dual layouts."""
        return tuple(
            plan_boxing(_dual(plan.destination), _dual(plan.source), plan.shape, plan.itemsize)
            for plan in reversed(self.plans)
        )

    @property
    def forward_bytes(self) -> int:
        """On the wire, all ranks together, of one micro-batch."""
        return sum(map(wire_bytes, self.plans)) if self.shape is not None else 0

    @property
    def backward_bytes(self) -> int:
        """The same of the gradient."""
        return sum(map(wire_bytes, self.backward_plans)) if self.shape is not None else 0


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

    def input_layout(self, choice: ResolvedLayer, taken: Extent, arriving: Layout | None = None) -> Layout:
        """How a layer's input has to lie, which arrives so: what is alike for all samples stays on all ranks."""
        if taken.num_dims == 0 or (taken.is_alike and (arriving is None or arriving.is_broadcast)):
            return self.layout(choice.stage, broadcast, broadcast)
        return self._wanted(choice, taken)

    def _wanted(self, choice: ResolvedLayer, taken: Extent) -> Layout:
        samples, model = Split(taken.batch_dim or 0), cast(Sbp, broadcast)
        if choice.parallel == "data":
            return self.layout(choice.stage, samples, samples)
        if self.resolved.options.sequence and "Norm" in choice.kind and taken.num_dims > 2:
            return self.layout(choice.stage, samples, Split(0 if taken.batch_dim == 1 else 1))
        if choice.split == "row" and choice.kind != TABLE:
            model = Split(feature_dim(choice.kind, taken.num_dims))
        return self.layout(choice.stage, samples, model)

    def output_layout(self, choice: ResolvedLayer, input_layout: Layout, taken: Extent, given: Extent) -> Layout:
        """How a layer's function leaves its output, whose input lies so."""
        if choice.split is None:
            return _Behind(input_layout, choice.kind, taken).as_taken(choice.kind, given)
        model: Sbp = Split(feature_dim(choice.kind, given.num_dims)) if choice.split == "column" else partial_sum
        data = broadcast if given.is_alike else Split(given.batch_dim or 0)
        return self.layout(choice.stage, data, model)

    def boxed_output_layout(
        self, choice: ResolvedLayer, following: ResolvedLayer | None, output_layout: Layout, given: Extent
    ) -> Layout:
        """Where sums and columns of a table go at once; other outputs stay as they are."""
        if choice.split is None or (choice.split == "column" and choice.kind != TABLE):
            return output_layout
        if self.resolved.options.sequence and given.num_dims > 2:
            wanted = self.layout(choice.stage, Split(0), Split(1))
        elif following is None or following.stage != choice.stage:
            wanted = self.layout(choice.stage, Split(0), Split(0))
        elif following.split == "row":
            wanted = self.layout(choice.stage, Split(0), broadcast)
        else:
            wanted = self._wanted(following, given)
        return output_layout.with_sbp((output_layout.sbp[0], wanted.sbp[1]))


@dataclass(frozen=True, slots=True)
class _Behind:
    """What lies behind a layer's door, for the layers after it."""

    layout: Layout
    kind: str
    extent: Extent

    def as_taken(self, kind: str, taken: Extent) -> Layout:
        """The layout as it is after functions that make ``taken`` of it: samples stay samples, features features."""
        names = {feature_dim(self.kind, self.extent.num_dims): feature_dim(kind, taken.num_dims)}
        if self.extent.batch_dim is not None and taken.batch_dim is not None:
            names[self.extent.batch_dim] = taken.batch_dim
        return self.layout.with_sbp(tuple(_renamed(entry, names, taken.num_dims) for entry in self.layout.sbp))


def _renamed(entry: Sbp, names: Mapping[int, int], num_dims: int) -> Sbp:
    if not isinstance(entry, Split):
        return entry
    dim = names.get(entry.dim, entry.dim)
    return Split(dim) if dim < num_dims else broadcast


def layer_edges(
    layers: Sequence[Layer],
    resolved: ResolvedStrategy,
    extents: Sequence[LayerExtents],
    micro_batch: int,
    *,
    itemsize: int = 4,
) -> list[LayerEdge]:
    """The way through the model, layer by layer.

    Args:
        layers: in the order of the forward.
        resolved: what each of them does.
        extents: how large their inputs and outputs are (see ``traced`` and ``of_linear_layers``).
        micro_batch: samples per micro-batch, all ranks together.
        itemsize: bytes of an element of an activation.

    >>> from workbench.core.strategy import Strategy
    >>> layers = [Layer("fc1", "Linear", {"weight": (8, 4)}), Layer("fc2", "Linear", {"weight": (2, 8)})]
    >>> resolved = Strategy("fc1: data; fc2: model").resolve(layers, num_ranks=2)
    >>> [plan.kind for plan in layer_edges(layers, resolved, of_linear_layers(layers, (4,)), 16)[1].plans]
    ['all-gather']
    """
    stages, found = Stages(resolved), list[LayerEdge]()
    behind: dict[bool, _Behind] = {}  # positions beside the way arrive where a layer takes what is alike for all
    for index, (layer, choice, extent) in enumerate(zip(layers, resolved.layers, extents, strict=True)):
        taken, given = extent.input or _UNKNOWN, extent.output or extent.input or _UNKNOWN
        known, plans, arriving = extent.input is not None, list[BoxingPlan](), None
        if index:
            before, last = extents[index - 1], resolved.layers[index - 1]
            out = before.output or before.input or _UNKNOWN
            door = stages.boxed_output_layout(last, choice, found[-1].output_layout, out)
            plans += _plans(found[-1].output_layout, door, out.whole(micro_batch), itemsize)
            known = known and (before.output is not None or not plans)
            behind[out.is_alike] = _Behind(door, layers[index - 1].kind, out)
            if layer.kind != TABLE and taken.is_alike in behind:  # a table takes ids, not what is before
                arriving = behind[taken.is_alike].as_taken(layer.kind, taken)
        input_layout = stages.input_layout(choice, taken, arriving)
        if arriving is not None:
            plans += _plans(arriving, input_layout, taken.whole(micro_batch), itemsize)
        output_layout = stages.output_layout(choice, input_layout, taken, given)
        found.append(
            LayerEdge(input_layout, output_layout, taken.whole(micro_batch) if known else None, tuple(plans), itemsize)
        )
    return found


def traced(layers: Sequence[Layer], rows: Sequence[LayerCost], sample_shape: Shape | None) -> list[LayerExtents]:
    """What passes through the layers of a model whose costs are known. A layer of which nobody has counted what it
    takes takes what the one before gives.
    """
    arriving = None if sample_shape is None else Extent(sample_shape)
    found: dict[str, LayerExtents] = {}
    for row in rows:
        given = row.given
        takes = row.taken or _own_features(row.layer, arriving)
        found[row.layer.name] = LayerExtents(takes, given)
        arriving = given
    return [found.get(layer.name, LayerExtents()) for layer in layers]


def of_linear_layers(layers: Sequence[Layer], sample_shape: Shape | None) -> list[LayerExtents]:
    """What is known before costs are: sizes as far as linear layers on flat samples tell them."""
    arriving = Extent(sample_shape) if sample_shape is not None and len(sample_shape) == 1 else None
    found = []
    for layer in layers:
        is_linear = arriving is not None and layer.kind == "Linear"
        gives = Extent((layer.shapes["weight"][0],)) if is_linear else None
        found.append(LayerExtents(_own_features(layer, arriving), gives))
        arriving = gives
    return found


def _own_features(layer: Layer, arriving: Extent | None) -> Extent | None:
    """What the layer before output_layout, with the layer's own number of features where that says one."""
    if arriving is None or not arriving.sizes or layer.kind not in _LINEAR or "weight" not in layer.shapes:
        return arriving
    inputs = layer.shapes["weight"][0 if layer.kind in TRANSPOSED_KINDS else 1]
    return replace(arriving, sizes=(*arriving.sizes[:-1], inputs))


def _plans(source: Layout, target: Layout, shape: Shape, itemsize: int) -> tuple[BoxingPlan, ...]:
    """The boxing from one layout to the other; none where nothing changes."""
    plan = plan_boxing(source, target, shape, itemsize) if source != target else None
    return (plan,) if plan is not None and plan.kind not in ("none", "relabel") else ()


def _dual(layout: Layout) -> Layout:
    """The layout of the gradient; along axes of one rank nothing changes."""
    entries = zip(layout.sbp, layout.placement.shape, strict=True)
    return layout.with_sbp(tuple(dual(entry) if size > 1 else entry for entry, size in entries))


__all__ = ["LayerEdge", "LayerExtents", "Stages", "layer_edges", "of_linear_layers", "traced", "wire_bytes"]
