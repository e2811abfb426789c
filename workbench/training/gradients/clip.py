"""Clipping by the norm of all gradients: the norm of the sums of the gradients' terms, over all stages.

``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` work unchanged, because their inner functions are replaced
here. The terms are summed in flat buckets, for the norm and for the step that follows. One small exchange makes the
norm, with the same bits on every rank of the world. Terms and sums are scaled by the same factor, so gradients keep
their layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.nn.utils import clip_grad

from workbench.tensors.boxing.exchange import direct_exchange
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain, spec_of
from workbench.tensors.leaf_gradients import owner_of_grad
from workbench.tensors.patch_table import patch
from workbench.tensors.world import World
from workbench.training.gradients.reduction import Term, change_gradients, start_reduction, start_sums
from workbench.training.gradients.shard import is_first_holder, state_spec
from workbench.training.gradients.stale_optimizer import check_not_replaced

_LIST_AGAIN = "List module.parameters() again, after wb.parallelize."
_torch_total_norm: Callable[..., Any] = clip_grad._get_total_norm
_torch_clip: Callable[..., Any] = clip_grad._clip_grads_with_norm_


def total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> Any:
    """``torch.nn.utils.get_total_norm``: a plain tensor, equal on all ranks of the world. All ranks call it."""
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not any(isinstance(tensor, GlobalTensor) for tensor in listed):
        return _torch_total_norm(listed, norm_type, error_if_nonfinite, foreach)
    with torch.no_grad():
        norms = _norms(listed, float(norm_type))
        total = torch.linalg.vector_norm(norms, float(norm_type))
    if error_if_nonfinite:
        _torch_total_norm([total], float(norm_type), error_if_nonfinite=True)  # raises its error
    return total


def _norms(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of each tensor, from the norms of the ranks' parts."""
    world = next(t._spec.world for t in tensors if isinstance(t, GlobalTensor))
    widest = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    dtype = torch.promote_types(widest, torch.float32)
    ranks = tuple(range(world.world_size))
    rows = torch.zeros(world.world_size, len(tensors), dtype=dtype, device=world.device)
    torch.stack([norm.to(dtype) for norm in _own_norms(_parts(tensors, world), world, order)], out=rows[world.rank])
    tag, header = world.context.next_sum_tag(ranks), "the norm of gradients"
    parts = world.transport.all_reduce(rows, ranks, "sum", tag, header)  # the host would wait for an all-gather
    with local_torch():
        whole = torch.linalg.vector_norm(parts, order, dim=0) if order != 0 else parts.sum(0)
    return whole.to(widest)


def _parts(tensors: Sequence[torch.Tensor], world: World) -> list[tuple[torch.Tensor | None, bool]]:
    """This rank's part of every tensor, with terms of sums added, and whether this rank counts it.

    The step that follows uses the same sums.
    """
    present = [t for t in tensors if isinstance(t, GlobalTensor) and not t._spec.is_placeholder]
    owners = {tensor: owner for tensor in present if (owner := owner_of_grad(tensor)) is not None}
    sums = start_reduction(owners.values())()
    others = [t for t in present if t not in owners]
    other_sums = start_sums([_term_of(t) for t in others])()
    parts: list[tuple[torch.Tensor | None, bool]] = []
    for tensor in tensors:
        if not isinstance(tensor, GlobalTensor):
            parts.append((tensor.detach(), world.rank == 0))
        elif tensor._spec.is_placeholder:
            parts.append((None, False))
        elif tensor in owners:
            parts.append((sums[owners[tensor]], is_first_holder(state_spec(owners[tensor]))))
        else:
            parts.append((other_sums[tensor], is_first_holder(tensor._spec)))
    return parts


def _term_of(tensor: GlobalTensor) -> Term:
    spec, local = tensor._spec, plain(tensor)
    summed = spec_of(spec.world, spec.layout.without_terms(), spec.shape)
    exchange = direct_exchange(spec, summed, local.dtype)
    return Term(tensor, local, exchange.group or (spec.world.rank,), exchange)


def _own_norms(parts: Sequence[tuple[torch.Tensor | None, bool]], world: World, order: float) -> list[torch.Tensor]:
    """The norms of this rank's parts, in few launches; zero where another rank counts the same elements."""
    counted = {
        number: local for number, (local, is_own) in enumerate(parts) if is_own and local is not None and local.numel()
    }
    norms = dict(zip(counted, torch._foreach_norm([*counted.values()], order), strict=True)) if counted else {}
    if len(norms) < len(parts):
        nothing = torch.full((), math.inf if order < 0 else 0.0, device=world.device)
        norms = dict.fromkeys(range(len(parts)), nothing) | norms
    return [norms[at] for at in range(len(parts))]


def clip_with_norm(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: Any = None) -> None:
    """``torch.nn.utils.clip_grads_with_norm_``: scale every term in place.

    Raises:
        LayoutError: some of the parameters are those of a module before ``wb.parallelize``.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    check_not_replaced("clip_grad_norm_", listed, _LIST_AGAIN)
    whole = value_on_all_ranks(total_norm) if isinstance(total_norm, GlobalTensor) else total_norm
    _torch_clip([p for p in listed if not isinstance(p, GlobalTensor)], max_norm, whole, foreach)
    with torch.no_grad(), local_torch():
        scale = torch.clamp(float(max_norm) / (whole + 1e-6), max=1.0)

    def multiply(tensors: list[torch.Tensor]) -> None:
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            torch._foreach_mul_([tensor for tensor in tensors if tensor.dtype == dtype], scale.to(dtype))

    change_gradients([p for p in listed if isinstance(p, GlobalTensor)], multiply)


def _clip_values(torchs_own: Callable[..., None]) -> Callable[..., None]:
    """``torch.nn.utils.clip_grad_value_``, which ignores parameters without a gradient, and so all replaced ones."""

    def clip(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check_not_replaced("clip_grad_value_", listed, _LIST_AGAIN)
        torchs_own(listed, clip_value, foreach)

    return clip


for _place in ("torch.nn.utils.clip_grad.clip_grad_value_", "torch.nn.utils.clip_grad_value_"):
    patch(_place, "parameters that were replaced have no gradients to clip", _clip_values)
for _place in ("torch.nn.utils.clip_grad._get_total_norm", "torch.nn.utils.get_total_norm"):
    patch(_place, "the norm of a shard is not that of its tensor", lambda torchs_own: total_norm)
for _place in ("torch.nn.utils.clip_grad._clip_grads_with_norm_", "torch.nn.utils.clip_grads_with_norm_"):
    patch(_place, "gradients are scaled before their terms have been summed", lambda torchs_own: clip_with_norm)
