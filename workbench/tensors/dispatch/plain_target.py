"""In-place functions of a plain tensor with global operands: ``total += loss`` leaves the logical value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import broadcast
from workbench.tensors.boxing.box import box
from workbench.tensors.conversion import from_local, to_local
from workbench.tensors.dispatch.registry import fold_name
from workbench.tensors.global_tensor import GlobalTensor


def writes_to_plain(func: Callable[..., Any], args: Any) -> bool:
    """Whether the call is an in-place function whose target is a plain tensor."""
    return (
        bool(args)
        and isinstance(args[0], torch.Tensor)
        and not isinstance(args[0], GlobalTensor)
        and fold_name(func).in_place
    )


def write_to_plain(func: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
    """Run ``func`` on a global copy of the target, and copy the logical result into the target on every rank."""
    target = args[0]
    spec = next(leaf._spec for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GlobalTensor))
    copy = from_local(target, spec.world, spec.layout).clone()
    func(copy, *args[1:], **kwargs)
    everywhere = Placement.of(spec.layout.placement.device_type, list(range(spec.world.world_size)))
    target.copy_(to_local(box(copy, Layout(everywhere, (broadcast,)))))  # type: ignore[arg-type]
    return target
