"""Sizes of the inputs and outputs of a model's layers, from their costs or from the shapes of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

from workbench.core.model_costs import Extent, LayerCost
from workbench.core.rows import Layer
from workbench.core.weight_splits import LINEAR_KINDS, TRANSPOSED_KINDS


@dataclass(frozen=True, slots=True)
class LayerExtents:
    """Extents of a layer's input and output, and bytes of an element of each; None if unknown.

    ``source`` numbers the tensor that it takes: calls that have seen the same one have the same number. ``chosen``: of
    fused experts, how many a token chooses; 0 if unknown.
    """

    input: Extent | None = None
    output: Extent | None = None
    input_itemsize: int | None = None
    output_itemsize: int | None = None
    source: int | None = None
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class WholeExtent(Extent):
    """The size of an activation of one micro-batch that has been seen: ``sizes`` is its logical shape."""

    @property
    def num_dims(self) -> int:
        """Number of ``sizes``."""
        return len(self.sizes)

    def whole(self, num_samples: int) -> tuple[int, ...]:
        """The logical shape."""
        return self.sizes


class ObservedCalls:
    """The calls of layers in the first call of a model.

    Attributes:
        found: the layer and the extents of each, in order; empty until the model has returned.
        are_followed: whether output hooks go by their order, see ``ShardingPlan.settle``.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know of no call."""
        self.found: list[tuple[str, LayerExtents]] = []
        self.are_followed = False
        self._recorded: list[tuple[str, LayerExtents]] | None = None
        self._tensors: dict[int, tuple[ref[Any], int]] = {}  # by id, which a later one may get again

    def begin(self) -> None:
        """The model is called."""
        self._recorded = None if self.found else []
        self._tensors = {}

    def end(self, has_returned: bool) -> None:
        """The call of the model has ended."""
        if has_returned and self._recorded is not None:
            self.found = self._recorded
        self._recorded, self._tensors = None, {}

    def add_input(self, name: str, extent: Extent, itemsize: int, tensor: Any) -> None:
        """A layer is called with ``tensor``, which may have been the input of earlier calls."""
        if self._recorded is not None:
            known, number = self._tensors.get(id(tensor), (None, 0))
            if known is None or known() is not tensor:
                number = len(self._recorded)
                self._tensors[id(tensor)] = ref(tensor), number
            self._recorded.append((name, LayerExtents(extent, input_itemsize=itemsize, source=number)))

    def add_output(self, name: str, extent: Extent, itemsize: int) -> None:
        """The call that has begun last returns; of an input that is equal for all samples, so is the output."""
        if self._recorded and self._recorded[-1][0] == name:
            known = self._recorded[-1][1]
            if known.input is not None and known.input.is_batchless:
                extent = replace(extent, batch_dim=None)
            self._recorded[-1] = name, replace(known, output=extent, output_itemsize=itemsize)


def traced(
    layers: Sequence[Layer], rows: Sequence[LayerCost], sample_shape: tuple[int, ...] | None
) -> list[LayerExtents]:
    """Extents of the layers of a model with known costs. An unknown input is the output of the layer before."""
    arriving = None if sample_shape is None else Extent(sample_shape)
    found: dict[str, LayerExtents] = {}
    for row in rows:
        given = row.output
        takes = row.input_extent or _own_features(row.layer, arriving)
        own = None if row.itemsize == 4 else row.itemsize  # those of 32 bits have the size of the strategy's precision
        found[row.layer.name] = LayerExtents(takes, given, own, own, chosen=row.layer.chosen)
        arriving = given
    return [found.get(layer.name, LayerExtents()) for layer in layers]


def of_linear_layers(layers: Sequence[Layer], sample_shape: tuple[int, ...] | None) -> list[LayerExtents]:
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
    if arriving is None or not arriving.sizes or layer.kind not in LINEAR_KINDS or "weight" not in layer.shapes:
        return arriving
    inputs = layer.shapes["weight"][0 if layer.kind in TRANSPOSED_KINDS else 1]
    return replace(arriving, sizes=(*arriving.sizes[:-1], inputs))
