"""In-place functions of a plain tensor with global operands: ``total += loss`` leaves the logical value.

In a pipeline's step a plain tensor that a stage writes to becomes a global tensor of this stage.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import broadcast
from workbench.errors import StrategyError
from workbench.tensors.boxing.box import box
from workbench.tensors.conversion import from_local, to_local
from workbench.tensors.dispatch.registry import fold_name
from workbench.tensors.global_tensor import GlobalTensor, Spec


def writes_to_plain(func: Callable[..., Any], args: Any) -> bool:
    """Whether the call is an in-place function whose target is a plain tensor."""
    return (
        bool(args)
        and isinstance(args[0], torch.Tensor)
        and not isinstance(args[0], GlobalTensor)
        and fold_name(func).in_place
    )


def write_to_plain(func: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
    """Run ``func`` on a global copy of the target, and copy the logical result into the target on every rank.

    Raises:
        StrategyError: in a pipeline's step, if the target shares its memory or takes gradients.
    """
    target = args[0]
    spec = next(leaf._spec for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GlobalTensor))
    if spec.world.context.running is not None and spec.layout.placement.num_ranks < spec.world.world_size:
        _make_global(target, spec)
        return func(*args, **kwargs)
    copy = from_local(target, spec.world, spec.layout).clone()
    func(copy, *args[1:], **kwargs)
    everywhere = Placement.of(spec.layout.placement.device_type, list(range(spec.world.world_size)))
    target.copy_(to_local(box(copy, Layout(everywhere, (broadcast,)))))  # type: ignore[arg-type]
    return target


def _make_global(target: torch.Tensor, spec: Spec) -> None:
    """A tensor that the program has made becomes one of the stage that writes to it.

    In a pipeline's step the other stages do something else, so that nobody could send them the result.

    Raises:
        StrategyError: the target takes gradients, or other tensors show its memory: they would miss the write.
    """
    if target.requires_grad or _num_showing_memory_of(target) > 1:
        raise StrategyError(
            f"a plain tensor {tuple(target.shape)} is written in place with values of {spec.layout.placement}, one "
            "stage of a pipeline, and is a view, has views, or takes gradients: the other stages would miss the write. "
            "Write to the whole tensor by index (out[:, i] = x), or make it on the stage: x.new_zeros(...)."
        )
    running: Any = spec.world.context.running
    with running.observer.made.without(target) if running.observer is not None else nullcontext():
        torch.utils.swap_tensors(target, from_local(target.clone(), spec.world, spec.layout))


def _num_showing_memory_of(target: torch.Tensor) -> int:
    storage = target.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # ``storage`` itself counts as one
