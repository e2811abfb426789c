"""Linear algebra, Fourier transforms: the matrices (signals) stay whole, and the batch may be split; in systems of
equations, the right-hand sides too.
"""

from __future__ import annotations

from collections.abc import Collection
from string import ascii_lowercase
from typing import Any

import torch

from workbench.tensors import random
from workbench.tensors.boxing.box import box_implicitly
from workbench.tensors.dispatch.registry import (
    Call,
    Resolution,
    along,
    composite,
    elementwise_except,
    normalize_dims,
    rule,
)
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.rules.random.sampling import sample_of_shape

_OF_A_MATRIX = """
linalg_cholesky linalg_cholesky_ex linalg_inv linalg_inv_ex linalg_det linalg_slogdet linalg_eig linalg_eigh
linalg_eigvals linalg_eigvalsh linalg_svd linalg_svdvals linalg_qr linalg_lu linalg_lu_factor linalg_lu_factor_ex
linalg_ldl_factor linalg_ldl_factor_ex linalg_matrix_exp linalg_matrix_power linalg_cond linalg_pinv
linalg_matrix_rank cholesky cholesky_inverse inverse pinverse det logdet slogdet qr svd lu matrix_exp matrix_power
geqrf
"""
_WITH_A_VECTOR = "linalg_householder_product lu_unpack"
_WHOLE = "WXYZ"

_FORGET_GRADIENTS = ("linalg_cond", "linalg_householder_product", "linalg_det", "det")
"""For an empty batch these have no gradient, or no second one, and a rank without it would let the others wait."""


def _factors(call: Call, core: tuple[int, ...]) -> Resolution | None:
    """The last ``core`` dims of the operands stay whole, and so do all dims of the results after the batch dims."""
    if len(call.operands) != len(core):
        return None
    batch = max(len(shape) - n for shape, n in zip(call.shapes, core, strict=True))
    extra = [len(shape) - batch for shape, _ in call.outputs]
    if min(extra) < 0:  # lu_unpack returns an empty tensor for each result that the caller has switched off
        return None
    left = ", ".join("..." + _WHOLE[:n] for n in core)
    filled = "#1#2#3#4" if call.name in _FORGET_GRADIENTS else ""
    return Resolution(f"{left} -> {', '.join('...' + _WHOLE[:n] for n in extra)}", filled=filled)


@rule(*_OF_A_MATRIX.split())
def _of_a_matrix(call: Call) -> Resolution | None:
    return _factors(call, (2,))


@rule(*_WITH_A_VECTOR.split())
def _with_a_vector(call: Call) -> Resolution | None:
    return _factors(call, (2, 1))


@rule("linalg_solve", "linalg_solve_ex")
def _solve(call: Call) -> Resolution | None:
    """A X = B, column by column. The additional result of ``solve_ex`` depends on A only."""
    if len(call.operands) != 2:
        return None
    matrix, sides = call.shapes
    takes_vectors = len(sides) == 1 or (len(matrix) - 1 == len(sides) and sides == matrix[:-1])
    batch = sides[:-1] if takes_vectors else sides[:-2]
    if batch != matrix[:-2] and len(call.outputs) > 1:
        return None
    columns = "N" if takes_vectors else "Nk" if call.kwargs.get("left", True) else "kN"
    infos = ", ..." * (len(call.outputs) - 1)
    return Resolution(f"...NM, ...{columns} -> ...{columns}{infos}")


@rule("linalg_solve_triangular")
def _solve_triangular(call: Call) -> Resolution | None:
    sides = "Nk" if call.kwargs.get("left", True) else "kN"
    return Resolution(f"...NM, ...{sides} -> ...{sides}") if len(call.operands) == 2 else None


@rule("cholesky_solve", "triangular_solve", "lu_solve", "linalg_lu_solve", "linalg_ldl_solve", "ormqr")
def _solve_by_factors(call: Call) -> Resolution | None:
    if call.name == "cholesky_solve":
        text = "...Nk, ...NM -> ...Nk"
    elif call.name == "triangular_solve":
        text = "...Nk, ...NM -> ...Nk, ...NM"
    elif call.name == "lu_solve":
        text = "...Nk, ...NM, ...N -> ...Nk"
    elif call.name == "ormqr":
        sides = "Nk" if call.arg(3, "left", True) else "kN"
        text = f"...NM, ...M, ...{sides} -> ...{sides}"
    else:
        sides = "Nk" if call.kwargs.get("left", True) else "kN"
        text = f"...NM, ...N, ...{sides} -> ...{sides}"
    return Resolution(text) if len(call.operands) == text.partition("->")[0].count(",") + 1 else None


@rule("linalg_cross", "cross")
def _cross(call: Call) -> Resolution:
    """The vectors stay whole. Without a dim, torch.cross takes the first dim of size 3; in a shard, that may be another
    one.
    """
    dim = call.arg(2, "dim") if call.name == "cross" else call.kwargs.get("dim", -1)
    if dim is None:
        dim = next((d for d, size in enumerate(call.shapes[0]) if size == 3), -1)
    text = along(max(map(len, call.shapes)), dim, "X")
    pinned = None if call.name != "cross" else lambda *_: lambda x, y, *_, **__: torch.cross(x, y, dim=dim)
    return Resolution(f"{text}, {text} -> {text}", pinned)


@rule("linalg_vander")
def _vander(call: Call) -> Resolution:
    """Default number of powers: the logical length of the vector."""
    num_powers = call.outputs[0][0][-1]
    return Resolution("... -> ...N", lambda *_: lambda x, *_, **__: torch.linalg.vander(x, N=num_powers))


def _transform(ndim: int, dims: Collection[int]) -> Resolution:
    """Transformed dims stay whole, and every rank needs a row: the FFT library refuses some empty shards."""
    return Resolution(elementwise_except(ndim, dims), filled=ascii_lowercase)


@rule("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
def _along_one_dim(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    return _transform(ndim, normalize_dims(call.arg(2, "dim", -1), ndim))


@rule("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_hfft2", "fft_ihfft2")
def _along_two_dims(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    return _transform(ndim, normalize_dims(call.arg(2, "dim", (-2, -1)), ndim))


@rule("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_hfftn", "fft_ihfftn")
def _along_dims(call: Call) -> Resolution:
    """The transformed dims. Default: the last ones, as many as there are sizes; all without sizes."""
    ndim = len(call.shapes[0])
    dims, sizes = call.arg(2, "dim"), call.arg(1, "s")
    if dims is None and sizes is not None:
        dims = range(ndim - (1 if isinstance(sizes, int) else len(sizes)), ndim)
    return _transform(ndim, normalize_dims(dims, ndim))


@rule("fft_fftshift", "fft_ifftshift")
def _shift(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    return Resolution(elementwise_except(ndim, normalize_dims(call.arg(1, "dim"), ndim), addend=True))


@rule("stft")
def _stft(call: Call) -> Resolution:
    """A batch of signals may be split; all share the window. Complex signals have more frequencies than real ones."""
    batch = "n" * (len(call.shapes[0]) - 1)
    rest = "XYZ"[: len(call.outputs[0][0]) - len(batch)]
    text = f"{batch}T{', W' * (len(call.operands) - 1)} -> {batch}{rest}"
    return Resolution(text, filled="n", goes_by_dtype=True)


@composite("svd_lowrank")
def svd_lowrank(A: Any, q: int | None = 6, niter: int | None = 2, M: Any = None) -> Any:  # noqa: N803 - torch's names
    """``torch.svd_lowrank(A - M)`` by Halko et al., arXiv 0909.4061, algorithm 5.1."""
    matrix = _everywhere(A if M is None else A - M.broadcast_to(A.shape))
    if matrix.shape[-2] < matrix.shape[-1]:
        right, values, left = _tall(matrix.mH, 6 if q is None else q, 2 if niter is None else niter)
        return left, values, right
    return _tall(matrix, 6 if q is None else q, 2 if niter is None else niter)


def _everywhere(matrix: Any) -> Any:
    if not isinstance(matrix, GlobalTensor):
        return matrix
    return box_implicitly(matrix, matrix._spec.layout.broadcast(), "svd_lowrank")


def _tall(matrix: Any, q: int, niter: int) -> tuple[Any, Any, Any]:
    directions = sample_of_shape(matrix, (matrix.shape[-1], q), random.normal_sampler(), matrix.dtype)
    basis = torch.linalg.qr(matrix @ directions).Q
    for _ in range(niter):
        basis = torch.linalg.qr(matrix.mH @ basis).Q
        basis = torch.linalg.qr(matrix @ basis).Q
    left, values, right = torch.linalg.svd(basis.mH @ matrix, full_matrices=False)
    return basis @ left, values, right.mH


@composite("pca_lowrank")
def pca_lowrank(A: Any, q: int | None = None, center: bool = True, niter: int = 2) -> Any:  # noqa: N803 - torch's names
    """Principal components: a low-rank approximation of the centred rows."""
    rows, columns = A.shape[-2:]
    q = min(6, rows, columns) if q is None else q
    if not 0 <= q <= min(rows, columns):
        raise ValueError(f"q(={q}) must be non-negative integer and not greater than min(m, n)={min(rows, columns)}")
    if niter < 0:
        raise ValueError(f"niter(={niter}) must be non-negative integer")
    return svd_lowrank(A - A.mean(dim=(-2,), keepdim=True) if center else A, q, niter)
