"""The forward of row-split linear layers under the option ``overlap``: their sums overlap with their products.

A row-split layer gives a sum of terms, which the output hook boxes to the layout of the next layer. Here the rows are
cut in pieces, and the exchange of one piece is in progress while the next one is computed. In backward the gradient of
the result takes the way back, and its exchange overlaps with the products for the input and the weight. A column-split
layer behind it exchanges nothing by itself, except under ``sequence``, where it gathers its input as a whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from workbench.core.layout import Layout
from workbench.core.row_pieces import RowPieces, row_pieces
from workbench.core.sbp import Split, partial_sum
from workbench.core.weight_splits import overlaps, split_dim
from workbench.tensors.boxing.overlapped import is_overlapped, product_of_pieces
from workbench.tensors.global_tensor import GlobalTensor, Spec, spec_of
from workbench.tensors.torch_patches.joined_rows import is_conv1d
from workbench.training.strategies.layout_hooks import PrepareOutput
from workbench.training.strategies.state import ParallelState, layers_of


def install(module: nn.Module, state: ParallelState) -> list[Any]:
    """Let the row-split linear layers of ``module`` overlap, if the strategy says so."""
    pieces = state.strategy.options.overlap
    if pieces == 1:
        return []
    found = []
    for (_, layer), choice in zip(layers_of(module), state.resolved.layers, strict=True):
        _, num_ranks = state.resolved.stage_width(choice.stage)
        if overlaps(choice.kind, choice.split, num_ranks) and _runs_its_class(layer):
            found.append(OverlappedForward(layer, PrepareOutput(state.in_use, choice), choice.kind, pieces))
    return found


class OverlappedForward:
    """The forward of a linear layer in pieces, in the place of the module's own until ``remove``.

    Args:
        module: a row-split linear layer.
        hook: its output hook.
        kind: of the layer.
        pieces: into how many pieces rows are cut, or fewer where there are fewer rows.
    """

    runs_its_class = True
    """Whether parameters are used as the class uses them."""

    def __init__(self, module: nn.Module, hook: PrepareOutput, kind: str, pieces: int) -> None:
        self._module, self._hook, self._pieces = module, hook, pieces
        self._dim = split_dim(kind, "row")
        module.forward = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(type(self._module).forward, self._module)
        cut = self._cut(args[0]) if len(args) == 1 and not kwargs else None
        return forward(*args, **kwargs) if cut is None else product_of_pieces(forward, args[0], *cut, self._hook.name)

    def _cut(self, rows: Any) -> tuple[RowPieces, Spec] | None:
        """The pieces, and where the whole result goes; None where the output hook boxes it as ever."""
        weight: Any = self._module.weight
        if not isinstance(rows, GlobalTensor) or not isinstance(weight, GlobalTensor) or not rows.is_floating_point():
            return None
        world, shape = rows._spec.world, rows._spec.shape
        # Explicit mode refuses the boxing, a transform differentiates it
        if not world.context.implicit_boxing_allowed or torch._C._are_functorch_transforms_active():
            return None
        source = _layout_of_terms(rows._spec, weight._spec, self._dim)
        if source is None:
            return None
        terms = spec_of(world, source, (*shape[:-1], weight.shape[1 - (self._dim or 0)]))
        target = spec_of(world, self._hook.target_of(terms), terms.shape)
        if not is_overlapped(terms, target, rows.dtype):
            return None
        pieces = row_pieces(source, target.layout, terms.shape, self._pieces)
        return None if pieces is None else (pieces, target)


def _layout_of_terms(rows: Spec, weight: Spec, dim: int | None) -> Layout | None:
    """The layout of a product whose inputs are split like the weight's; None for others."""
    if len(rows.shape) < 2 or rows.layout.placement != weight.layout.placement or rows.layout.has_partial:
        return None
    features = Split(len(rows.shape) - 1)
    axes = [mine == features for mine in rows.layout.sbp]
    if not any(axes) or axes != [entry == Split(dim or 0) for entry in weight.layout.sbp]:
        return None
    entries = (partial_sum if is_split else entry for is_split, entry in zip(axes, rows.layout.sbp, strict=True))
    return rows.layout.with_sbp(tuple(entries))


def _runs_its_class(layer: nn.Module) -> bool:
    """Whether the layer computes a linear function of each row, as classes of torch and ``transformers`` do."""
    kind = type(layer)
    return "forward" not in layer.__dict__ and (kind.forward is nn.Linear.forward or is_conv1d(kind))
