"""Layouts of activations between layers, and the boxings between them, for panel, cost model and tables.

The model is a chain of layers: the output of each layer is the input of the next. A residual has the layout of the
tensor to which it is added. The rules are those of the layout hooks (``training.strategies``): outputs of row-split
layers and of split embeddings are boxed at once, to the layout that the next layer needs.
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
"""An unknown extent: its layout is that of a matrix, and its bytes are not counted."""
_LINEAR = ("Linear", "NonDynamicallyQuantizableLinear", *TRANSPOSED_KINDS)


@dataclass(frozen=True, slots=True)
class LayerExtents:
    """Extents of a layer's input and output; None if unknown."""

    input: Extent | None = None
    output: Extent | None = None


@dataclass(frozen=True)
class LayerEdge:
    """The input of one layer: its layout, and the boxings from the output of the layer before.

    Attributes:
        input_layout: layout of the layer's input.
        output_layout: layout of the result of its function: P for a row-split layer.
        shape: logical shape of the input; None if unknown, bytes are then 0.
        plans: the boxings, in order, from the output of the layer before to ``input_layout``; none at the first layer.
        itemsize: bytes of an element.
    """

    input_layout: Layout
    output_layout: Layout
    shape: Shape | None
    plans: tuple[BoxingPlan, ...] = ()
    itemsize: int = 4

    @cached_property
    def backward_plans(self) -> tuple[BoxingPlan, ...]:
        """The boxings of the gradient: reversed, between the dual layouts."""
        return tuple(
            plan_boxing(_dual(plan.destination), _dual(plan.source), plan.shape, plan.itemsize)
            for plan in reversed(self.plans)
        )

    @property
    def forward_bytes(self) -> int:
        """Bytes on the wire of one micro-batch, summed over ranks."""
        return sum(map(wire_bytes, self.plans)) if self.shape is not None else 0

    @property
    def backward_bytes(self) -> int:
        """Bytes on the wire of the gradient of one micro-batch, summed over ranks."""
        return sum(map(wire_bytes, self.backward_plans)) if self.shape is not None else 0


@lru_cache(maxsize=4096)
def wire_bytes(plan: BoxingPlan) -> int:
    """Bytes that ranks receive from each other, counted without a list of moves."""
    return sum(plan.bytes_received.values())


class Stages:
    """Placements of a strategy's stages as (data, model) grids, and layouts of layers on them."""

    def __init__(self, resolved: ResolvedStrategy) -> None:
        self.resolved = resolved
        self.placements = tuple(Placement.of("cpu", resolved.stage_grid(stage)) for stage in range(resolved.num_stages))

    def layout(self, stage: int, data: Sbp, model: Sbp) -> Layout:
        """A layout on a stage's grid. Axes of one rank are B."""
        placement = self.placements[stage]
        axes_sbp = (
            entry if size > 1 else broadcast for entry, size in zip((data, model), placement.shape, strict=True)
        )
        return Layout(placement, tuple(axes_sbp))

    def parameter(self, layer: Layer, choice: ResolvedLayer, shape: Shape) -> Layout:
        """The layout of a parameter. A column split cuts output features, also of biases; a row split inputs."""
        outputs_last = layer.kind in (TABLE, *TRANSPOSED_KINDS)
        entry: Sbp = broadcast
        if choice.split == "column":
            entry = Split(len(shape) - 1 if outputs_last else 0)
        elif choice.split == "row" and len(shape) > 1:
            entry = Split(0 if outputs_last else 1)
        return self.layout(choice.stage, broadcast, entry)

    def input_layout(self, choice: ResolvedLayer, taken: Extent, arriving: Layout | None = None) -> Layout:
        """The layout of a layer's input. A tensor that is equal for all samples stays on all ranks."""
        if taken.num_dims == 0 or (taken.is_batchless and (arriving is None or arriving.is_broadcast)):
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
        """The layout of the result of a layer's function."""
        if choice.split is None:
            return _BoxedOutput(input_layout, choice.kind, taken).as_taken(choice.kind, given)
        model: Sbp = Split(feature_dim(choice.kind, given.num_dims)) if choice.split == "column" else partial_sum
        data = broadcast if given.is_batchless else Split(given.batch_dim or 0)
        return self.layout(choice.stage, data, model)

    def boxed_output_layout(
        self, choice: ResolvedLayer, following: ResolvedLayer | None, output_layout: Layout, given: Extent
    ) -> Layout:
        """The output layout after the output hook, which boxes partial sums and columns of an embedding."""
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
class _BoxedOutput:
    """A layer's output after the output hook, as later layers see it."""

    layout: Layout
    kind: str
    extent: Extent

    def as_taken(self, kind: str, taken: Extent) -> Layout:
        """The layout after functions that turn it into ``taken``: samples stay samples, features stay features."""
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
    """The inputs of all layers, with the boxings before them.

    Args:
        layers: in the order of the forward.
        resolved: the choice of each layer.
        extents: extents of inputs and outputs (see ``traced`` and ``of_linear_layers``).
        micro_batch: samples per micro-batch, all ranks together.
        itemsize: bytes of an element of an activation.

    >>> from workbench.core.strategy import Strategy
    >>> layers = [Layer("fc1", "Linear", {"weight": (8, 4)}), Layer("fc2", "Linear", {"weight": (2, 8)})]
    >>> resolved = Strategy("fc1: data; fc2: model").resolve(layers, num_ranks=2)
    >>> [plan.kind for plan in layer_edges(layers, resolved, of_linear_layers(layers, (4,)), 16)[1].plans]
    ['all-gather']
    """
    stages, found = Stages(resolved), list[LayerEdge]()
    boxed_outputs: dict[bool, _BoxedOutput] = {}  # by whether the tensor is equal for all samples, such as positions
    for index, (layer, choice, extent) in enumerate(zip(layers, resolved.layers, extents, strict=True)):
        taken, given = extent.input or _UNKNOWN, extent.output or extent.input or _UNKNOWN
        known, plans, arriving = extent.input is not None, list[BoxingPlan](), None
        if index:
            before, last = extents[index - 1], resolved.layers[index - 1]
            out = before.output or before.input or _UNKNOWN
            boxed = stages.boxed_output_layout(last, choice, found[-1].output_layout, out)
            plans += _plans(found[-1].output_layout, boxed, out.whole(micro_batch), itemsize)
            known = known and (before.output is not None or not plans)
            boxed_outputs[out.is_batchless] = _BoxedOutput(boxed, layers[index - 1].kind, out)
            if layer.kind != TABLE and taken.is_batchless in boxed_outputs:  # an embedding takes ids
                arriving = boxed_outputs[taken.is_batchless].as_taken(layer.kind, taken)
        input_layout = stages.input_layout(choice, taken, arriving)
        if arriving is not None:
            plans += _plans(arriving, input_layout, taken.whole(micro_batch), itemsize)
        output_layout = stages.output_layout(choice, input_layout, taken, given)
        found.append(
            LayerEdge(input_layout, output_layout, taken.whole(micro_batch) if known else None, tuple(plans), itemsize)
        )
    return found


def traced(layers: Sequence[Layer], rows: Sequence[LayerCost], sample_shape: Shape | None) -> list[LayerExtents]:
    """Extents of the layers of a model with known costs. An unknown input is the output of the layer before."""
    arriving = None if sample_shape is None else Extent(sample_shape)
    found: dict[str, LayerExtents] = {}
    for row in rows:
        given = row.output_extent
        takes = row.input_extent or _own_features(row.layer, arriving)
        found[row.layer.name] = LayerExtents(takes, given)
        arriving = given
    return [found.get(layer.name, LayerExtents()) for layer in layers]


def of_linear_layers(layers: Sequence[Layer], sample_shape: Shape | None) -> list[LayerExtents]:
    """Extents without costs: of linear layers on flat samples."""
    arriving = Extent(sample_shape) if sample_shape is not None and len(sample_shape) == 1 else None
    found = []
    for layer in layers:
        is_linear = arriving is not None and layer.kind == "Linear"
        gives = Extent((layer.shapes["weight"][0],)) if is_linear else None
        found.append(LayerExtents(_own_features(layer, arriving), gives))
        arriving = gives
    return found


def _own_features(layer: Layer, arriving: Extent | None) -> Extent | None:
    """The output of the layer before, with the number of features of the layer's weight."""
    if arriving is None or not arriving.sizes or layer.kind not in _LINEAR or "weight" not in layer.shapes:
        return arriving
    inputs = layer.shapes["weight"][0 if layer.kind in TRANSPOSED_KINDS else 1]
    return replace(arriving, sizes=(*arriving.sizes[:-1], inputs))


def _plans(source: Layout, target: Layout, shape: Shape, itemsize: int) -> tuple[BoxingPlan, ...]:
    """The boxing from one layout to the other; empty if nothing changes."""
    plan = plan_boxing(source, target, shape, itemsize) if source != target else None
    return (plan,) if plan is not None and plan.kind not in ("none", "relabel") else ()


def _dual(layout: Layout) -> Layout:
    """The layout of the gradient; axes of one rank keep their entries."""
    axes_sbp = zip(layout.sbp, layout.placement.shape, strict=True)
    return layout.with_sbp(tuple(dual(entry) if size > 1 else entry for entry, size in axes_sbp))


__all__ = ["LayerEdge", "LayerExtents", "Stages", "layer_edges", "of_linear_layers", "traced", "wire_bytes"]
