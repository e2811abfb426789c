"""Checks that all ranks hold the same: weights and first batch of a model in one exchange, plain operands on demand.

``WORKBENCH_CHECK=1`` (read when a rank joins its world) or ``wb.debug.check_agreement()`` turns the second on:
every plain tensor that meets a global one is hashed, and the hashes of the placement's ranks are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn
from zlib import crc32

import torch
from torch import nn
from torch.autograd import forward_ad

from workbench.core.layout import Layout
from workbench.errors import LayoutError
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World, current
from workbench.transport.user_code import name_in_user_code

_NUM_SAMPLED = 64
"""Elements of a plain tensor that its fingerprint reads."""
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def is_of_transform(local: torch.Tensor) -> bool:
    """Whether a function transform wraps a plain tensor, or forward mode gives it a tangent."""
    return _is_wrapped(local) or forward_ad.unpack_dual(local).tangent is not None


def refuse_in_transform(what: str, local: torch.Tensor) -> NoReturn:
    """Raise: ``what`` meets a plain tensor that a function transform wraps."""
    raise LayoutError(
        f"{what} meets a plain tensor of shape {tuple(local.shape)} inside a function transform (torch.vmap, "
        "torch.func.grad, forward mode). Transforms drop layouts: use torch.autograd.grad, or apply the transform to "
        "shards inside wb.local_map."
    )


def content_hash(local: torch.Tensor) -> int:
    """A hash of 56 bits over the bytes of a tensor; of a sparse one, over its indices and values."""
    local, found = local.detach().cpu(), hashlib.blake2b(digest_size=7)
    if local.layout is torch.strided:
        parts = [local]
    else:
        entries = local.to_sparse_coo().coalesce()
        parts = [entries.indices(), entries.values()]
    for part in parts:
        if part.numel():  # an empty array of numpy may have a stride that no other dtype can have
            found.update(part.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(found.digest(), "little")


def is_identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors have the same dtype, shape and values; nan is equal to nan.

    >>> is_identical(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
    True
    """
    is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return is_alike and (torch.equal(one, other) or content_hash(one) == content_hash(other))


@contextmanager
def check_agreement() -> Iterator[None]:
    """In this context, plain tensors that meet global ones are compared over the ranks; ``WORKBENCH_CHECK=1`` does it
    always.

    A plain tensor counts as B: it must be equal on all ranks of the placement. Each comparison costs a hash of the
    bytes and a short exchange. Use it to look for a mistake, not in training runs.

    Raises:
        LayoutError: the ranks disagree. It names the function, the argument, the ranks, both values and the fix.

    >>> x = wb.ones(4, placement=wb.placement(ranks=[0]), sbp="B")
    >>> with wb.debug.check_agreement():      # compares torch.ones(4) over the ranks  # doctest: +SKIP
    ...     y = x + torch.ones(4)
    """
    with current().context.temporarily(checks_agreement=True):
        yield


def check_plain_operand(local: torch.Tensor, world: World, layout: Layout, origin: Callable[[], str] | None) -> None:
    """Raise ``LayoutError`` if the ranks of the placement hold different bytes, dtypes or shapes. All ranks call it.

    ``origin`` says which argument of which function the tensor is, e.g. ``"add: argument 2 (other)"``.
    """
    where = origin() if origin is not None else "a plain tensor that meets a global one"
    described, first = _if_they_differ({where: local}, world, f"check of {where}"), layout.placement.grid[0]
    differing = [rank for rank in layout.placement if described and described[rank] != described[first]]
    if not differing:
        return
    (_, expected), (_, found) = (described[rank][where] for rank in (first, differing[0]))
    others = f"rank{'s' * (len(differing) > 1)} {', '.join(map(str, differing))}"
    variable = name_in_user_code(local, "plain")
    taken = f'wb.to_global({variable}, placement=wb.{layout.placement}, sbp="B", broadcast_from={first})'
    raise LayoutError(
        f"{where} is a plain tensor, and ranks {first} and {differing[0]} hold different values: rank {first} has "
        f"{expected}, rank {differing[0]} has {found} (unlike rank {first}: {others}). A plain tensor that "
        f"meets a global one counts as B, the same on all ranks of {layout.placement}. Make it the same on all, take "
        f"one rank's with {taken}, or say that the ranks hold parts: sbp='S(0)' or sbp='P'."
    )


def _summary(local: torch.Tensor) -> str:
    values = local.detach().to_dense().cpu().reshape(-1)
    head = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values[:3].tolist())
    more = ", ..." if values.numel() > 3 else ""
    total = f", sum {values.double().sum().item():.6g}" if values.numel() and not values.is_complex() else ""
    return f"{str(local.dtype).removeprefix('torch.')} {tuple(local.shape)} [{head}{more}]{total}"


def check_same_on_all_ranks(module: nn.Module, world: World) -> None:
    """Raise ``LayoutError`` if the plain parameters and buffers of ``module`` differ between ranks, or their order. All
    ranks call it.
    """
    if world.world_size == 1:
        return
    named = {
        name: tensor
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if not isinstance(tensor, GlobalTensor) and not tensor.is_meta
    }
    described = _if_they_differ(named, world, "parallelize", in_order=True)
    counts = {len(own) for own in described}
    if len(counts) > 1:
        raise LayoutError(
            f"parallelize: the ranks hold {sorted(counts)} parameters and buffers. All ranks build the same model."
        )
    if described and all(own == described[0] for own in described):
        listed = [list(own) for own in described]
        rank = next(rank for rank, order in enumerate(listed) if order != listed[0])
        first, other = next(pair for pair in zip(listed[0], listed[rank], strict=True) if pair[0] != pair[1])
        raise LayoutError(
            f"parallelize: the ranks list {len(listed[0])} parameters and buffers in different orders: {first!r} on "
            f"rank 0 is where {other!r} is on rank {rank}. Gradients are summed in this order. A set has another in "
            "each process: make the modules from a list, or from sorted(names)."
        )
    if described:
        rank, name = _first_difference(described)
        raise LayoutError(
            f"parallelize: {name!r} differs between rank 0 and rank {rank}. All ranks start from the same weights: "
            "call wb.manual_seed(0) on all ranks before building the model, or load the same checkpoint."
        )


_Described = dict[str, tuple[int, str]]


def _if_they_differ(
    named: Mapping[str, torch.Tensor], world: World, header: str, in_order: bool = False
) -> list[_Described]:
    """The ranks' tensors by name, as hash and text; nothing if all ranks hold the same (``in_order``: in the same
    order). All ranks call it.
    """
    hashes = {name: content_hash(tensor) for name, tensor in named.items()}
    names = list(named) if in_order else sorted(named)
    identity = "; ".join(f"{name}: {named[name].dtype} {tuple(named[name].shape)} {hashes[name]}" for name in names)
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    if len(set(all_gather_object(digest, world, header))) == 1:
        return []
    return all_gather_object({name: (hashes[name], _summary(t)) for name, t in named.items()}, world, header)


def _first_difference(described: list[_Described]) -> tuple[int, str]:
    """The first rank that differs from rank 0, and the name of a tensor in which it does."""
    return next(
        (rank, name)
        for rank, own in enumerate(described)
        for name in {**described[0], **own}
        if own.get(name) != described[0].get(name)
    )


def check_same_batch(named: Mapping[str, torch.Tensor], world: World, call: str) -> None:
    """Raise ``LayoutError`` if the plain tensors of a batch differ between ranks. All ranks call it.

    Each layer takes its rows of a batch that every rank passes whole: of unlike batches it would mix rows.

    Args:
        named: the batch's tensors by name; global ones, and those without values, are left out.
        call: what the batch was passed to, e.g. ``"forward_backward"``.
    """
    for tensor in named.values():
        if is_of_transform(tensor):
            refuse_in_transform(f"{call}: a parallelized module", tensor)
    if world.world_size == 1:
        return
    own = {name: tensor for name, tensor in named.items() if _can_be_compared(tensor)}
    described = _if_they_differ(own, world, f"{call}: comparison of a batch")
    if not described:
        return
    rank, name = _first_difference(described)
    first, other = (described[r].get(name, ("", "nothing"))[1] for r in (0, rank))
    raise LayoutError(
        f"{call}: the ranks pass different batches. {name} is {first} on rank 0 and {other} on rank {rank}. Plain "
        "tensors count as the whole batch, the same on every rank, and each rank computes its rows of it. Pass the "
        "whole batch on every rank, or let wb.GlobalDataLoader(dataset, batch_size, module=model) read a rank's rows. "
        "Where each rank has a part of the batch already, join the parts of inputs and targets: "
        f"wb.to_global(part, placement=wb.placement({world.device.type!r}, ranks={list(range(world.world_size))}), "
        'sbp="S(0)").'
    )


def fingerprint(leaves: Iterable[object]) -> str:
    """The plain tensors among ``leaves`` in a few characters: shapes, and of values on the CPU a checksum of some.

    Headers of exchanges carry it, so that ranks whose batches differ get an error, and neither mixed rows nor a mean of
    unlike means. Tensors of one shape share a checksum: a batch in many micro-batches is no longer than one.

    >>> fingerprint([torch.ones(5, 8)]), fingerprint([torch.zeros(5, 8), torch.ones(5, 8)])
    ('(5, 8)#10e45f38', '2x(5, 8)#17245b16')
    """
    counts, checksums = dict[str, int](), dict[str, int]()
    for tensor in filter(_can_be_compared, leaves):
        shape, content = str(tuple(tensor.shape)), _sample(tensor)  # type: ignore[attr-defined, arg-type]
        counts[shape] = counts.get(shape, 0) + 1
        if content is not None:
            checksums[shape] = crc32(content, checksums.get(shape, 0))
    return " ".join(
        f"{count}x{shape}"[2 * (count == 1) :] + (f"#{checksums[shape]:08x}" if shape in checksums else "")
        for shape, count in counts.items()
    )


def _sample(tensor: torch.Tensor) -> memoryview | None:
    """The bytes of some elements; None of a tensor on a device, for which the host would wait, and of others whose
    memory does not hold its elements one after the other.
    """
    count = tensor.numel()
    if tensor.device.type != "cpu" or not torch.ops.aten.is_non_overlapping_and_dense(tensor) or not count:
        return None
    step = count // _NUM_SAMPLED | 1  # odd: an even step may divide the length of rows and read one column only
    sample = tensor.detach().as_strided((-(-count // step),), (step,)).resolve_conj().resolve_neg().contiguous()
    return sample.view(torch.uint8).numpy().data


def _can_be_compared(value: object) -> bool:
    """Whether it is an ordinary plain tensor with values."""
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and not value.is_meta  # type: ignore[attr-defined]
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)  # type: ignore[arg-type]
    )
