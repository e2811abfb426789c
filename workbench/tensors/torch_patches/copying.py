"""Copies of global tensors: copy, deepcopy, pickle, torch.save.

A copy is local: every rank copies or saves its own shard, with the layout and its place in the world. What is loaded
must be loaded by the same rank of a world of the same size. ``if rank == 0: torch.save(...)`` so keeps a part of the
weights, which a warning says. A tensor that every rank holds whole is saved as a plain one, which any program loads.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.errors import LayoutError
from workbench.tensors.global_tensor import GlobalTensor, local_torch, new_placeholder, plain, spec_of, wrap
from workbench.tensors.tensor_state import DECLARED, share_memory
from workbench.tensors.world import current

_KEEPS_A_SHARD = (
    "torch.save or pickle of a global tensor that is split, or is on some of the ranks: it keeps what this rank holds, "
    "and only the same rank of as many loads it. For whole weights that any program reads, call "
    "wb.checkpoint.export_safetensors(model, folder) on all ranks; to go on later, "
    "wb.checkpoint.save(folder, model=model, optimizer=optimizer)."
)


def shallow_copy(tensor: GlobalTensor) -> GlobalTensor:
    """``copy.copy``: another object over the same storage."""
    with torch.no_grad():
        made: Any = wrap(plain(tensor), tensor._spec)
    make_like(made, tensor, own_attributes(tensor))
    with local_torch():
        share_memory(made, tensor)
    return made


def deep_copy(tensor: GlobalTensor, memo: dict[int, Any]) -> GlobalTensor:
    """``copy.deepcopy``: a copy of the shard; tensors that share storage still do afterwards.

    A parameter keeps what the strategy says of its optimizer.

    Raises:
        RuntimeError: the tensor has a history, as for plain tensors.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    with local_torch():
        if not tensor.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment. Write x.detach() or x.detach().clone()."
            )
    local = plain(tensor)
    memo.setdefault(id(memo), []).append(local)  # deepcopy stores ids, so their tensors must stay alive
    made = wrap(copy.deepcopy(local, memo), tensor._spec)
    memo[id(tensor)] = made
    make_like(made, tensor, copy.deepcopy(own_attributes(tensor), memo))
    if tensor._is_param:  # its optimizer's state is copied too, and lies as it does
        made._optimizer_shard, made._keeps_state_on_host = tensor._optimizer_shard, tensor._keeps_state_on_host
        made._number = tensor._number
    grad = None if tensor._is_param else tensor.grad  # torch does not copy a parameter's gradient
    if grad is not None:
        made.grad = copy.deepcopy(grad, memo)
    return made


def own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that the user has given to a tensor."""
    return {name: value for name, value in tensor.__dict__.items() if name not in DECLARED}


def make_like(made: torch.Tensor, tensor: GlobalTensor, attributes: dict[str, Any]) -> None:
    """Give a new leaf what ``tensor`` is: a parameter, one that requires a gradient; and attributes of the user's."""
    made.__dict__.update(attributes)
    if tensor._is_param:
        made._is_param = True
    with local_torch():
        made.requires_grad_(tensor.requires_grad)


def reduce(tensor: GlobalTensor, protocol: Any) -> tuple[Any, ...] | str:
    """What pickle stores: a plain tensor where every rank of the world holds the whole.

    Otherwise the shard, its layout as text, and which rank of how many it belongs to.
    """
    spec = tensor._spec
    placement = spec.layout.placement
    attributes = own_attributes(tensor)
    with local_torch():
        needs_grad = tensor.requires_grad
        local = plain(tensor) if not spec.is_placeholder else torch.empty(0, dtype=tensor.dtype)
        if local.untyped_storage().nbytes() > 2 * local.nbytes:
            local = local.clone()
        if spec.is_whole_everywhere:
            whole = torch.nn.Parameter(local, needs_grad) if tensor._is_param else local.requires_grad_(needs_grad)
            vars(whole).update(attributes)
            return whole.__reduce_ex__(protocol)
    warnings.warn(_KEEPS_A_SHARD, stacklevel=2)
    ranks = torch.tensor(placement.grid).reshape(placement.shape).tolist()
    return rebuild, (
        local,
        (placement.device_type, ranks, [str(entry) for entry in spec.layout.sbp]),
        list(spec.shape),
        (spec.world.rank, spec.world.world_size),
        needs_grad,
        tensor._is_param,
        attributes,
    )


def rebuild(
    local: torch.Tensor,
    layout: tuple[str, list[Any], list[str]],
    shape: list[int],
    saved_by: tuple[int, int],
    requires_grad: bool,
    is_parameter: bool,
    attributes: dict[str, Any],
) -> GlobalTensor:
    """The global tensor that ``reduce`` stored.

    Raises:
        LayoutError: another rank saved it, or a world of another size.
    """
    world = current()
    device_type, ranks, sbp = layout
    if saved_by != (world.rank, world.world_size):
        raise LayoutError(
            f"loading a global tensor of shape {tuple(shape)}, {', '.join(sbp)} on {device_type}:{ranks}: rank "
            f"{saved_by[0]} of {saved_by[1]} saved it, this is rank {world.rank} of {world.world_size}. A file holds "
            "the shard of one rank: load on the same world, each rank its own file; or save x.full_tensor(), which any "
            "world can load."
        )
    found = Layout.of(Placement.of(device_type, ranks), sbp)
    spec = spec_of(world, found, tuple(shape))
    if spec.is_placeholder:
        local = new_placeholder(spec.shape, local.dtype, world.device)
    made = wrap(local.detach(), spec)
    made.__dict__.update(attributes)
    if is_parameter:
        made._is_param = True
    with local_torch():
        made.requires_grad_(requires_grad)
    return made


torch.serialization.add_safe_globals([rebuild])  # for torch.load(weights_only=True)
