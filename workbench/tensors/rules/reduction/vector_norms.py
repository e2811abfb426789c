"""Norms and distances. The norm of the parts' norms is the norm of the whole, for every order but zero."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from workbench.tensors.dispatch.local_call import sum_terms
from workbench.tensors.dispatch.planning import as_autocast_gives, check_as_torch
from workbench.tensors.dispatch.registry import (
    Call,
    Resolution,
    composite,
    elementwise_except,
    normalize_dims,
    rule,
    term,
)
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.rules.reduction.two_stage import splits, stages_of, two_stages
from workbench.tensors.rules.reduction.variance import accumulation_dtype


@composite("linalg_vector_norm")
def vector_norm(
    x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: Any = None
) -> Any:
    """Norm over split dims: the norm of the shards' norms."""
    if type(x) is not GlobalTensor or out is not None:
        return NotImplemented
    shape = x._spec.shape
    dims = normalize_dims(dim, len(shape))
    if not splits(x, dims) or 0 in shape or not (x.is_floating_point() or x.is_complex()):
        return NotImplemented
    check_as_torch(torch.linalg.vector_norm, x, ord, dim, keepdim, dtype=dtype)
    given = as_autocast_gives(x, torch.linalg.vector_norm, x, ord, dim) if dtype is None else x.to(dtype)
    x = sum_terms(given)
    if math.isinf(ord):
        size = x.abs()
        return size.amax(dims, keepdim=keepdim) if ord > 0 else size.amin(dims, keepdim=keepdim)
    wide, result = accumulation_dtype(x.dtype.to_real()), x.dtype.to_real()
    norm = torch.linalg.vector_norm

    def first(t: torch.Tensor) -> torch.Tensor:
        if t.numel() == 0 and ord < 0:  # an empty shard adds no power, so its norm of negative order is infinite
            return t.abs().sum(dims, keepdim=True).to(wide) + math.inf
        return norm(t.to(accumulation_dtype(t.dtype)), ord, dims, keepdim=True)

    def second(norms: torch.Tensor) -> torch.Tensor:
        found = norm(norms, ord, dims, keepdim=True) if ord != 0 else norms.sum(dims, keepdim=True)
        return found.to(result)

    return two_stages(x, stages_of(x, dims), keepdim, first, second, (wide, result), "norm")


@composite("linalg_norm")
def linalg_norm(
    A: Any,  # noqa: N803 - torch's name for the argument
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    **options: Any,
) -> Any:
    """``torch.linalg.norm`` where it is a vector norm or a matrix norm with a formula."""
    if type(A) is not GlobalTensor or options.get("out") is not None or isinstance(ord, str):
        return NotImplemented
    num_dims = A.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)
    dtype = options.get("dtype")
    check_as_torch(torch.linalg.norm, A, ord, dim, keepdim, dtype=dtype)
    if ord is None or num_dims == 1:
        return torch.linalg.vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
    return torch.linalg.matrix_norm(A, ord, (-2, -1) if dim is None else dim, keepdim, dtype=dtype)


@composite("linalg_matrix_norm")
def matrix_norm(
    A: Any,  # noqa: N803 - torch's name for the argument
    ord: Any = "fro",
    dim: Any = (-2, -1),
    keepdim: bool = False,
    **options: Any,
) -> Any:
    """Frobenius norm, and norms by rows or columns. Norms by singular values fall back."""
    if type(A) is not GlobalTensor or options.get("out") is not None:
        return NotImplemented
    dtype = options.get("dtype")
    check_as_torch(torch.linalg.matrix_norm, A, ord, dim, keepdim, dtype=dtype)
    if ord == "fro":
        return torch.linalg.vector_norm(A, 2, dim, keepdim, dtype=dtype)
    if isinstance(ord, str) or abs(ord) not in (1, math.inf):
        return NotImplemented
    first, second = normalize_dims(dim, A.dim())
    summed, kept = (first, second) if abs(ord) == 1 else (second, first)
    sums = torch.linalg.vector_norm(A, 1, summed, True, dtype=dtype)
    found = sums.amax(kept, keepdim=True) if ord > 0 else sums.amin(kept, keepdim=True)
    return found if keepdim else found.squeeze(max(first, second)).squeeze(min(first, second))


@composite("frobenius_norm")
def frobenius_norm(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """``torch.frobenius_norm``, which takes no order."""
    return torch.linalg.vector_norm(input, 2, dim or None, keepdim)


@composite("norm_except_dim")
def norm_except_dim(v: Any, pow: int = 2, dim: int = 0) -> Any:
    """Norm over all dims but one, dims kept."""
    if type(v) is not GlobalTensor:
        return NotImplemented
    dims = None if dim == -1 else [d for d in range(v.dim()) if d not in normalize_dims(dim, v.dim())]
    return torch.linalg.vector_norm(v, pow, dims, keepdim=dim != -1)


@composite("dist")
def dist(input: Any, other: Any, p: float = 2) -> Any:
    """Norm of the difference."""
    first, second = (as_autocast_gives(x, torch.dist, input, other, p) for x in (input, other))
    return torch.linalg.vector_norm(first - second, p)


@composite("normalize")
def normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Unit vectors. torch expands the norms: over a split dim, their gradient would be as large as the whole."""
    found = input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)
    return found if out is None else out.copy_(found)


@rule("cosine_similarity")
def _cosine_similarity(call: Call) -> Resolution:
    """Two operands that broadcast, reduced over one dim of the common shape, which stays whole."""
    ndim = max(map(len, call.shapes))
    dims = normalize_dims(call.arg(2, "dim", 1), ndim)
    texts = [term(ndim, dims)[ndim - len(shape) :] for shape in call.shapes]
    return Resolution(f"{', '.join(texts)} -> {term(ndim, dropped=dims)}")


@composite("cosine_similarity")
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Cosine of the angle along ``dim``; over a split dim from the global norms."""
    ndim = max(x1.dim(), x2.dim())
    along = normalize_dims(dim, ndim)[0] - ndim
    if not any(splits(x, [along + x.dim()]) for x in (x1, x2)):
        return NotImplemented
    if x1.dim() != x2.dim() or x1.shape[along] != x2.shape[along]:  # the smaller one is repeated
        common = torch.broadcast_shapes(x1.shape, x2.shape)
        x1, x2 = x1.expand(common), x2.expand(common)
    check_as_torch(F.cosine_similarity, x1, x2, dim, eps)
    x1, x2 = (as_autocast_gives(x, F.cosine_similarity, x1, x2, dim, eps) for x in (x1, x2))
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    first, second = (_unit(x if x.is_floating_point() else x.to(dtype), along, eps) for x in (x1, x2))
    return (first * second).sum(along)


def _unit(x: Any, dim: int, eps: float) -> Any:
    norm = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
    return x / norm.clamp_min(eps)


@composite("pairwise_distance")
def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    """Norm of the difference along the last dim."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@rule("renorm")
def _renorm(call: Call) -> Resolution:
    """One norm per slice along ``dim``; the other dims stay whole."""
    ndim = len(call.shapes[0])
    return Resolution(elementwise_except(ndim, set(range(ndim)) - set(normalize_dims(call.arg(2, "dim"), ndim))))
