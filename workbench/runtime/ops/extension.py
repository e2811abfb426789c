"""Ways in for functions of users: an equation for a function that torch dispatches, or a function on shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.core.layout import Layout
from workbench.errors import SbpError
from workbench.runtime.boxing import box_implicitly
from workbench.runtime.ops.ghost import infer_outputs
from workbench.runtime.ops.local import local_call
from workbench.runtime.ops.registry import equations
from workbench.runtime.tensor import GlobalTensor


def rule(name: str, equation: str) -> None:
    """Give the torch function or operator ``name`` an equation, e.g. ``wb.rule("my_norm", "b D, D -> b D")``.

    Letters are dims that may be split, capitals dims that must stay whole, ``+`` marks addends of a sum; see
    ``workbench.core.rules``.
    """
    equations(name, equation)


def local_map(
    function: Callable[..., torch.Tensor], in_sbp: Sequence[Any], out_sbp: Any
) -> Callable[..., GlobalTensor]:
    """``function`` on shards, with declared layouts: its operands are boxed to ``in_sbp``, its result has ``out_sbp``.

    The way in for a custom ``autograd.Function`` or a kernel of your own. The result's logical shape is inferred
    from the shards' shapes: ``function`` must run on meta tensors.

    >>> double = wb.local_map(lambda x: x * 2, in_sbp=[wb.sbp.split(0)], out_sbp=wb.sbp.split(0))
    """

    def mapped(*operands: GlobalTensor) -> GlobalTensor:
        placement = operands[0]._spec.layout.placement
        if len(operands) != len(in_sbp):
            raise SbpError(
                f"local_map: {len(operands)} operands but in_sbp has {len(in_sbp)} entries. Give one per operand."
            )
        layouts = [Layout.of(placement, sbp).normalized(t._spec.shape) for t, sbp in zip(operands, in_sbp, strict=True)]
        boxed = [box_implicitly(t, layout, "local_map") for t, layout in zip(operands, layouts, strict=True)]
        shape, dtype = infer_outputs(function, tuple(boxed), {})[0][0][:2]
        layout = Layout.of(placement, out_sbp).normalized(shape)
        return local_call(_on_plain(function), boxed, layouts, (layout, shape, dtype), "local_map")

    return mapped


def _on_plain(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *shards: function(*(shard.as_subclass(torch.Tensor) for shard in shards))


__all__ = ["local_map", "rule"]
