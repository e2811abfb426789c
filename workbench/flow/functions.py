"""Mathematics of programs: torch's functions under the names and with the arguments of the older documents.

In a job they run on the devices of its scope, outside of jobs on those of their operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.core.sbp import Broadcast
from workbench.flow.jobs.context import in_scope, running_job
from workbench.flow.jobs.micro_batches import counts_of_micro_batches, map_micro_batches
from workbench.tensors.boxing.box import box


def _accepts_torch_arguments(torchs: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Accept torch's arguments too (``dim=``, or a number in the second place), as newer programs write them."""

    def choose(older: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(older)
        def run(*args: Any, **kwargs: Any) -> Any:
            is_newer = kwargs.keys() & {"dim", "dim0", "dim1"} or isinstance(args[1] if args[1:] else None, int)
            return (torchs if is_newer else older)(*args, **kwargs)

        return in_scope(run)

    return choose


@in_scope
def matmul(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """The matrix product of ``a`` and ``b``, either of them transposed first.

    >>> matmul(torch.ones(4, 5), torch.ones(8, 5), transpose_b=True).shape
    torch.Size([4, 8])
    """
    return torch.matmul(a.transpose(-2, -1) if transpose_a else a, b.transpose(-2, -1) if transpose_b else b)


@in_scope
def reshape(x: Any, shape: Sequence[int]) -> Any:
    """``x`` in another logical shape. One size may be -1."""
    return torch.reshape(x, tuple(shape))


@in_scope
def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Join dims from ``start_dim`` to ``end_dim``."""
    return torch.flatten(input, start_dim, end_dim)


@_accepts_torch_arguments(torch.transpose)
def transpose(a: Any, perm: Sequence[int] | None = None) -> Any:
    """``a`` with its dims in the order ``perm``. Default: reversed."""
    return a.permute(tuple(reversed(range(a.dim()))) if perm is None else tuple(perm))


@_accepts_torch_arguments(torch.cat)
def concat(inputs: Sequence[Any], axis: int = 0) -> Any:
    """Tensors one after the other along ``axis``."""
    return torch.cat(tuple(inputs), axis)


@in_scope
def cast(x: Any, dtype: torch.dtype) -> Any:
    """``x`` in another dtype."""
    return x.to(dtype)


@_accepts_torch_arguments(torch.squeeze)
def squeeze(input: Any, axis: int | Sequence[int] | None = None) -> Any:
    """``input`` without dims of size 1."""
    if axis is None:
        return torch.squeeze(input)
    return torch.squeeze(input, axis if isinstance(axis, int) else tuple(axis))


@_accepts_torch_arguments(torch.unsqueeze)
def expand_dims(input: Any, axis: int) -> Any:
    """``input`` with a new dim of size 1 before dim ``axis``."""
    return torch.unsqueeze(input, axis)


@in_scope
def slice(x: Any, begin: Sequence[int | None], size: Sequence[int | None]) -> Any:  # noqa: A001 - as programs write it
    """``size[d]`` elements from ``begin[d]`` on, for each dim.

    A beginning of None is 0, and a negative one counts from the end. A size of None or -1 is the rest of the dim.
    """
    for dim, (start, count) in enumerate(zip(begin, size, strict=True)):
        first = start or 0
        rest = x.shape[dim] * (first >= 0) - first
        x = torch.narrow(x, dim, first, rest if count is None or count == -1 else count)
    return x


@_accepts_torch_arguments(torch.gather)
def gather(params: Any, indices: Any, axis: int = 0) -> Any:
    """Slices of ``params`` along ``axis`` by their indices: rows of a table, for example.

    The dims of ``indices`` take the place of ``axis``.
    """
    axis, indices = axis + params.dim() * (axis < 0), indices.long()
    if axis == 0 and params.dim() == 2:
        return torch.nn.functional.embedding(indices, params)
    found = torch.index_select(params, axis, indices.reshape(-1))
    return found.reshape(params.shape[:axis] + indices.shape + params.shape[axis + 1 :])


@in_scope
def identity(x: Any) -> Any:
    """``x``, on the devices of the scope."""
    return x


def parallel_cast(input: Any, distribute: Any = None, gradient_distribute: Any = None, name: str | None = None) -> Any:
    """``input`` in another layout on the devices of the scope: ``distribute=flow.distribute.split(axis=0)``.

    Its gradient has the layout of ``input``.
    """
    job = running_job("parallel_cast")
    if counts_of_micro_batches(input):
        return map_micro_batches(parallel_cast, (input, distribute), {})
    if job.is_mirrored:
        return input
    return box(input, job.layout(distribute or Broadcast()).normalized(tuple(input.shape)))
