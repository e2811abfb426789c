"""From plain tensors to global ones and back. Each conversion is an autograd node, so gradients are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, SbpLike, Split, broadcast, dual, partial_sum
from workbench.errors import LayoutError, PlacementError, SbpError
from workbench.tensors.agreement import check_plain_operand, content_hash, is_of_transform, refuse_in_transform
from workbench.tensors.boxing.box import box
from workbench.tensors.copy_to_device import copy_to_device
from workbench.tensors.execution_context import OUTSIDE
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, new_placeholder, spec_of, wrap
from workbench.tensors.leaf_gradients import mark_placeholder_leaves
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.tensor_state import spread_zero
from workbench.tensors.world import World, current


class _FromLocal(torch.autograd.Function):
    """Plain shard -> global tensor. A plain tensor that requires a gradient gets the whole one under B."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.dtype, ctx.shape = spec, local.dtype, tuple(local.shape)
        running = spec.world.context.running
        ctx.leaf = None if running is None else running.numbered_leaf(local, spec)
        if spec.is_placeholder:
            return new_placeholder(spec.shape, local.dtype, spec.world.device)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        spec, dual, local = ctx.spec, ctx.spec.dual, grads[0]
        if local is None:
            local = spread_zero(dual.local_shape, ctx.dtype, spec.world.device)
        with local_torch():
            grad = wrap(local.view_as(local), dual)
        if ctx.leaf is not None and ctx.leaf.keeps(grad):
            return None, None
        if spec.layout.is_broadcast:
            everywhere = Placement.of(spec.layout.placement.device_type, list(range(spec.world.world_size)))
            grad = box(grad, Layout(everywhere, (broadcast,)), "backward")
        else:
            grad = box(grad, spec.layout.without_terms())
        if ctx.shape != spec.local_shape or (spec.is_placeholder and not spec.layout.is_broadcast):
            return None, None
        return to_local(grad), None


class _ToLocal(torch.autograd.Function):
    """Global tensor -> plain shard. A loss on a copy of B is computed by every rank: each contributes one n-th."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, spec: Spec, divisor: int) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.divisor = spec, divisor
        if spec.is_placeholder:
            return tensor.new_empty([0] * max(1, len(spec.shape)))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        spec = ctx.spec
        mark_placeholder_leaves(ctx)
        if grad is None or ctx.divisor == 1:
            return (None if spec.is_placeholder else grad), None, None
        if not torch.is_grad_enabled():
            return (None if spec.is_placeholder else grad / ctx.divisor), None, None
        # The gradient is a plain tensor that becomes global. So its own gradient needs the conversion too.
        with local_torch():
            entered = box(wrap(_FromLocal.apply(grad, spec), spec), spec.layout.dual())
            return entered.view_as(entered).as_subclass(torch.Tensor), None, None


def refuse_dtensor(value: Any, call: str) -> None:
    """Raise ``LayoutError`` for a DTensor of torch, which says by itself who holds what."""
    if type(value).__name__ == "DTensor":
        raise LayoutError(
            f"{call}: the tensor of shape {tuple(value.shape)} is a DTensor of torch, {list(value.placements)} on the "
            f"ranks {value.device_mesh.mesh.tolist()}. Only one system can know a layout. Give this rank's part: "
            'wb.to_global(x.to_local(), placement, "S(0)"), with S(0) for Shard(0), B for Replicate() and P for '
            'Partial(). Of other kinds, such as Partial("avg") and _StridedShard, give the whole: '
            'wb.to_global(x.full_tensor(), placement, "B").'
        )


def refuse_nested(value: torch.Tensor, call: str) -> None:
    """Raise ``LayoutError`` for a nested tensor, whose functions take a parameter's local part for a plain tensor: each
    rank would run all samples, and their gradients would be added up.
    """
    if value.is_nested:
        raise LayoutError(
            f"{call} is a nested tensor (torch.nested) of {value.size(0)} samples, each of its own length. A global "
            "tensor has one length per dim. Pad the samples, and mask what is padded: x.to_padded_tensor(0.0)."
        )


def from_local(
    local: torch.Tensor,
    world: World,
    layout: Layout,
    origin: Callable[[], str] | None = None,
    stays: bool = False,
) -> GlobalTensor:
    """A plain tensor as B on the placement of the global ones that it meets: every rank must hold the same value.

    It moves to the device of the shards; if ``stays``, a tensor without gradient stays where it is. ``origin`` names
    its argument in the error of check mode.
    """
    refuse_dtensor(local, "a global tensor meets another kind")
    if is_of_transform(local):
        refuse_in_transform(f"a global tensor on {layout.placement}", local)
    has_grad = local.requires_grad and torch.is_grad_enabled()
    if has_grad:
        _refuse_replaced(local)
    spec = spec_of(world, layout.broadcast(), tuple(local.shape))
    if world.context.checks_agreement:
        check_plain_operand(local, world, layout, origin)
    if local.device != world.device and not spec.is_placeholder and (has_grad or not stays):
        local = copy_to_device(local, world.device)
    if has_grad:
        return wrap(_FromLocal.apply(local, spec), spec)
    return wrap(new_placeholder(spec.shape, local.dtype, world.device) if spec.is_placeholder else local.detach(), spec)


def from_local_once(local: torch.Tensor, world: World, layout: Layout) -> GlobalTensor:
    """``from_local``, within the call of a module with the result of the last one for the same tensor and layout,
    unless it was written since.

    A mask that every layer reads is then boxed once, and its slice is in memory once. Between two calls it may be
    written through ``.data`` or an array of numpy, which torch does not count.
    """
    call = world.context.call
    if call is OUTSIDE or local.requires_grad or local.is_inference():
        return from_local(local, world, layout)
    known = world.context.made_once.setdefault(layout.broadcast(), WeakIdKeyDictionary())
    version, in_call, made = known.get(local, (-1, None, None))
    if version != local._version or in_call is not call:
        made = from_local(local, world, layout)
        known[local] = local._version, call, made
    assert made is not None
    return made


REPLACED = WeakIdKeyDictionary()
"""Plain parameters whose modules have global ones in their place."""
_MOST_NODES = 1000


def _refuse_replaced(plain: torch.Tensor) -> None:
    """Raise for a parameter that was replaced, or what was computed from one: it does not learn any more."""
    if not REPLACED:
        return
    found = [plain] if plain.is_leaf else _leaves(plain)
    for leaf in found:
        if leaf in REPLACED:
            raise LayoutError(
                f"a global tensor meets a parameter of shape {tuple(leaf.shape)} from before wb.parallelize, which has "
                "put a global one in its place: the old one keeps its values and learns no more. A list, a closure or "
                "a variable holds it. Read the parameter from its module (module.layer.weight) where it is used, "
                "or detach() the old one if its values are meant."
            )


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a tensor was computed from, as far as a long history is searched."""
    leaves: list[torch.Tensor] = []
    seen, waiting = set[Any](), [tensor.grad_fn]
    while waiting and len(seen) < _MOST_NODES:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            leaves.append(leaf)
        waiting += [before for before, _ in node.next_functions]
    return leaves


def to_local(tensor: GlobalTensor, grad_sbp: SbpLike | None = None) -> torch.Tensor:
    """This rank's shard as a plain tensor, with its history; ``grad_sbp`` as in ``GlobalTensor.to_local``."""
    spec = tensor._spec
    divisor = spec.layout.num_replicas if grad_sbp is None else _copies_of_gradient(spec.layout, grad_sbp)
    with local_torch():
        return _ToLocal.apply(tensor, spec, divisor)


def _copies_of_gradient(layout: Layout, grad_sbp: SbpLike) -> int:
    """Number of ranks that receive the same gradient, if its layout is ``grad_sbp``."""
    wanted, divisor = Layout.of(layout.placement, grad_sbp), 1
    for entry, given, size in zip(layout.sbp, wanted.sbp, layout.placement.shape, strict=True):
        legal = (broadcast, partial_sum) if isinstance(entry, Broadcast) else (dual(entry),)
        if given not in legal:
            raise SbpError(
                f"to_local(grad_sbp={wanted.sbp}): the tensor has sbp {layout.sbp}, so the gradient of {entry} is "
                f"{' or '.join(str(e) for e in legal)}, not {given}. B is for "
                "the same loss on all ranks, P for a loss of each rank's own."
            )
        divisor *= size if isinstance(entry, Broadcast) and given == broadcast else 1
    return divisor


def to_global(
    local: torch.Tensor,
    placement: Placement,
    sbp: SbpLike,
    *,
    broadcast_from: int | None = None,
) -> GlobalTensor:
    """Plain tensors, one per rank, as one global tensor. All ranks of the world call it.

    S concatenates the ranks' tensors (whatever their sizes; they are re-balanced where need be), P takes them as terms
    of a sum, B says that they are equal: that is checked, and nobody's data is overwritten unless ``broadcast_from``
    names the rank whose tensor counts.

    Args:
        local: this rank's tensor; ignored on ranks outside the placement.
        placement: the ranks that hold the result.
        sbp: one entry per axis of the placement.
        broadcast_from: the rank whose tensor is taken by all, e.g. 0.

    Raises:
        LayoutError: ranks disagree about dtype, number of dims, or the value of a broadcast tensor; or it is sparse.
        PlacementError: ``broadcast_from`` is no rank of this world.

    On two ranks, ``wb.to_global(torch.ones(2, 3), placement=p, sbp=wb.sbp.split(0)).shape`` is (4, 3).
    """
    world = current()
    refuse_dtensor(local, "wb.to_global")
    if isinstance(local, GlobalTensor):
        return box(local, Layout.of(placement, sbp).normalized(local._spec.shape))
    if local.layout is not torch.strided:
        raise LayoutError(
            f"wb.to_global: the tensor of shape {tuple(local.shape)} is {local.layout}; global tensors are strided. If "
            "it is the same on every rank, it stays plain: products with global tensors take it. Or give x.to_dense()."
        )
    layout = Layout.of(placement, sbp)
    placement.check_world(world.world_size)
    local = copy_to_device(local, world.device)
    if broadcast_from is not None:
        if broadcast_from not in range(world.world_size):
            raise PlacementError(
                f"to_global(broadcast_from={broadcast_from!r}): this world has the ranks 0 to {world.world_size - 1}. "
                "Name the one whose tensor all take."
            )
        return _from_one(local, world, layout, broadcast_from)
    metadata = _gather_metadata(local, world, with_hash=any(isinstance(entry, Broadcast) for entry in layout.sbp))
    shape, dtype = _logical_metadata(metadata, layout)
    layout = layout.normalized(shape)
    if world.rank not in placement:
        local = new_placeholder(shape, dtype, world.device)
    if torch.is_grad_enabled() and any(metadata[rank].requires_grad for rank in placement) and not local.requires_grad:
        local = local.detach().requires_grad_()  # all ranks need the same graph
    spec = spec_of(world, layout, shape)
    if any(metadata[rank].shape != layout.local_shape(shape, rank) for rank in placement):
        return _rebalance(local, world, layout, shape, metadata)
    return _as_global(local, spec)


def _as_global(local: torch.Tensor, spec: Spec) -> GlobalTensor:
    """This rank's shard as a global tensor with its history. Without one it is no view, which autograd would protect
    from writes.
    """
    has_grad = local.requires_grad and torch.is_grad_enabled()
    return wrap(_FromLocal.apply(local, spec) if has_grad else local.detach(), spec)


class _Metadata(NamedTuple):
    """What the ranks tell each other of their tensors. The hash is that of the content, 0 where nobody asks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    hash: int


def _gather_metadata(local: torch.Tensor, world: World, with_hash: bool) -> list[_Metadata]:
    content = content_hash(local) if with_hash else 0
    own = _Metadata(tuple(local.shape), local.dtype, local.requires_grad, content)
    return all_gather_object(own, world, "to_global of a plain tensor")


def _logical_metadata(metadata: list[_Metadata], layout: Layout) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the whole: sizes add up along split axes, everything else must agree."""
    placement = layout.placement
    first = metadata[placement.grid[0]]
    for rank in placement:
        other = metadata[rank]
        if (other.dtype, len(other.shape)) != (first.dtype, len(first.shape)):
            raise LayoutError(
                f"to_global: rank {placement.grid[0]} gives {first.dtype} {first.shape}, rank {rank} "
                f"gives {other.dtype} "
                f"{other.shape}. All ranks of {placement} give the same dtype and number of dims."
            )
    layout = layout.normalized(first.shape)
    lines = (layout.ranks_along(dim, placement.grid[0]) for dim in range(len(first.shape)))
    shape = [sum(metadata[rank].shape[dim] for rank in line) for dim, line in enumerate(lines)]
    for rank in placement:
        split = {entry.dim for entry in layout.sbp if isinstance(entry, Split)}
        fixed = [d for d in range(len(shape)) if d not in split and metadata[rank].shape[d] != shape[d]]
        if fixed:
            raise LayoutError(
                f"to_global: dim {fixed[0]} has {shape[fixed[0]]} rows on rank {placement.grid[0]} and "
                f"{metadata[rank].shape[fixed[0]]} on rank {rank}. Only split dims may differ between ranks."
            )
    _check_copies(metadata, layout)
    return tuple(shape), first.dtype


def _check_copies(metadata: list[_Metadata], layout: Layout) -> None:
    """Ranks that differ only on broadcast axes must hold the same bytes."""
    copies: dict[tuple[int, ...], int] = {}
    for rank in layout.placement:
        coordinates = layout.placement.coordinates(rank)
        place = tuple(c for c, entry in zip(coordinates, layout.sbp, strict=True) if not isinstance(entry, Broadcast))
        first = copies.setdefault(place, rank)
        if metadata[first].hash != metadata[rank].hash:
            raise LayoutError(
                f"to_global(sbp={layout.sbp}): ranks {first} and {rank} hold different values, but B "
                f"means the same value on "
                f"all. Give broadcast_from={first} to take rank {first}'s, sbp.split(0) to concatenate, "
                f"or sbp.partial_sum to add."
            )


def _rebalance(
    local: torch.Tensor, world: World, layout: Layout, shape: tuple[int, ...], metadata: list[_Metadata]
) -> GlobalTensor:
    """Shards of other than balanced sizes: put each into a zero tensor at its place, and let the sum be cut evenly."""
    for dim in sorted({entry.dim for entry in layout.sbp if isinstance(entry, Split)}):
        _check_rows(metadata, layout, dim)
        if world.rank in layout.placement:
            line = layout.ranks_along(dim, world.rank)
            start = sum(metadata[rank].shape[dim] for rank in line[: line.index(world.rank)])
            sizes = start, shape[dim] - start - local.shape[dim]
            before, after = (local.new_zeros((*local.shape[:dim], n, *local.shape[dim + 1 :])) for n in sizes)
            local = torch.cat([before, local, after], dim)
    terms = tuple(partial_sum if isinstance(entry, Split) else entry for entry in layout.sbp)
    spec = spec_of(world, layout.with_sbp(terms), shape)
    return box(_as_global(local, spec), layout)


def _check_rows(metadata: list[_Metadata], layout: Layout, dim: int) -> None:
    """Ranks at one place of the axes that split ``dim`` must have the same rows of it."""
    firsts: dict[tuple[int, ...], int] = {}
    for rank in layout.placement:
        place = zip(layout.placement.coordinates(rank), layout.sbp, strict=True)
        first = firsts.setdefault(tuple(c for c, entry in place if entry == Split(dim)), rank)
        if metadata[rank].shape[dim] != metadata[first].shape[dim]:
            raise LayoutError(
                f"to_global: {layout}: dim {dim} has {metadata[first].shape[dim]} rows on rank {first} and "
                f"{metadata[rank].shape[dim]} on rank {rank}. No axis that splits the dim lies between these ranks, so "
                "they must have the same rows of it."
            )


def _from_one(local: torch.Tensor, world: World, layout: Layout, source: int) -> GlobalTensor:
    metadata = _gather_metadata(local, world, with_hash=False)[source]
    spec = spec_of(world, Layout(Placement.of(layout.placement.device_type, [source]), (broadcast,)), metadata.shape)
    if world.rank != source:
        learns = metadata.requires_grad and torch.is_grad_enabled()
        local = new_placeholder(metadata.shape, metadata.dtype, world.device).requires_grad_(learns)
    return box(_as_global(local, spec), layout.normalized(metadata.shape))
