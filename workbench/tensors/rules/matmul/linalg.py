"""Linear algebra, Fourier transforms: the matrices (signals) stay whole, and the batch may be split; in systems of
equations, the right-hand sides too.
"""

from __future__ import annotations

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
_WITH_A_VECTOR = ("linalg_householder_product", "lu_unpack")
_WHOLE = "WXYZ"
_FORGET_GRADIENTS = ("linalg_cond", "linalg_householder_product", "linalg_det", "det")
"""For an empty batch these have no gradient, or no second one, and a rank without it would let the others wait."""


@rule(*_OF_A_MATRIX.split(), *_WITH_A_VECTOR)
def _factors(call: Call) -> Resolution | None:
    """The last ``core`` dims of the operands stay whole, and so do all dims of the results after the batch dims."""
    core = (2, 1) if call.name in _WITH_A_VECTOR else (2,)
    if len(call.operands) != len(core):
        return None
    batch = max(len(shape) - n for shape, n in zip(call.shapes, core, strict=True))
    extra = [len(shape) - batch for shape, _ in call.outputs]
    if min(extra) < 0:  # lu_unpack returns an empty tensor for each result that the caller has switched off
        return None
    left = ", ".join("..." + _WHOLE[:n] for n in core)
    filled = "#1#2#3#4" if call.name in _FORGET_GRADIENTS else ""
    return Resolution(f"{left} -> {', '.join('...' + _WHOLE[:n] for n in extra)}", filled=filled)


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


_BY_FACTORS = {
    "cholesky_solve": "...Nk, ...NM -> ...Nk",
    "triangular_solve": "...Nk, ...NM -> ...Nk, ...NM",
    "lu_solve": "...Nk, ...NM, ...N -> ...Nk",
    "linalg_solve_triangular": "...NM, ...Nk -> ...Nk",
    "linalg_lu_solve": "...NM, ...N, ...Nk -> ...Nk",
    "linalg_ldl_solve": "...NM, ...N, ...Nk -> ...Nk",
    "ormqr": "...NM, ...M, ...Nk -> ...Nk",
}


@rule(*_BY_FACTORS)
def _solve_by_factors(call: Call) -> Resolution | None:
    """Right-hand sides may be split: columns, or rows if the matrix stands on their right."""
    text = _BY_FACTORS[call.name]
    if call.name in ("linalg_solve_triangular", "linalg_lu_solve", "ormqr") and not call.arg(3, "left", True):
        text = text.replace("Nk", "kN")
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


_TRANSFORMS = [f"fft_{kind}fft{dims}" for kind in ("", "i", "r", "ir", "h", "ih") for dims in ("", "2", "n")]


@rule(*_TRANSFORMS)
def _transform(call: Call) -> Resolution:
    """Transformed dims stay whole, and every rank needs a row: the FFT library refuses some empty shards. Default of
    those with n: the last dims, as many as there are sizes; all without sizes.
    """
    ndim, sizes = len(call.shapes[0]), call.arg(1, "s")
    dims = call.arg(2, "dim", {"2": (-2, -1), "n": None}.get(call.name[-1], -1))
    if dims is None and sizes is not None:
        dims = range(ndim - (1 if isinstance(sizes, int) else len(sizes)), ndim)
    return Resolution(elementwise_except(ndim, normalize_dims(dims, ndim)), filled=ascii_lowercase)


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
