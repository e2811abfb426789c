"""Which inputs of listed experts have a known number of rows. The others are rows that a model picks by values."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from workbench.core.layer_extents import LayerExtents, WholeExtent
from workbench.core.model_costs import Extent
from workbench.core.weight_splits import TABLE, feature_dim


class ExpertInputs:
    """Inputs of listed experts, among the calls of a model's layers.

    Attributes:
        first: extents of the first layer of the expert whose layers are called.
        is_picked: whether values decide which rows that expert takes.
    """

    def __init__(self) -> None:
        self.first, self.is_picked = LayerExtents(), False
        self._around: dict[bool, tuple[WholeExtent, int]] = {}  # outputs outside of lists of experts, and their rows

    def pass_by(self, kind: str, given: Extent, is_output: bool) -> None:
        """A layer outside of lists is called. ``given`` is its output, or its input where that is unknown."""
        if isinstance(given, WholeExtent):
            has_ids = kind == TABLE and not is_output
            self._around[given.is_batchless] = given, prod(given.sizes) if has_ids else _num_rows(given, kind)

    def take(self, kind: str, extent: LayerExtents, is_first: bool) -> LayerExtents:
        """A layer of an expert is called: its extents, with the dim that counts samples.

        The rows that the first layer takes are known if they are as many as the layer before the list has given. Others
        were picked by values: nobody knows how many in the next batch.
        """
        taken = extent.input
        if isinstance(taken, WholeExtent) and not is_first:
            dim = None if self.first.input is None else self.first.input.batch_dim
            return replace(extent, input=replace(taken, batch_dim=dim))
        if isinstance(taken, WholeExtent):
            found = [around for around, rows in self._around.values() if rows == _num_rows(taken, kind)]
            alike = [around for around in found if around.sizes[:-1] == taken.sizes[:-1] or not around.batch_dim]
            self.is_picked = not alike and (bool(self._around) or taken.is_batchless)
            extent = replace(extent, input=replace(taken, batch_dim=alike[0].batch_dim)) if alike else extent
        else:  # not seen
            self.is_picked = taken is not None and taken.is_batchless
        self.first = extent if is_first else self.first
        return extent


def _num_rows(extent: WholeExtent, kind: str) -> int:
    """The number of rows of an activation; of images, the number of samples."""
    return prod(extent.sizes[: feature_dim(kind, len(extent.sizes))])
