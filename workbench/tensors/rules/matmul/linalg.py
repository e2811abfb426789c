"""Linear algebra: the matrices stay whole, and the batch may be split; in systems of equations, the right-hand sides
too.
"""

from __future__ import annotations

import torch

from workbench.tensors.dispatch.equation_text import along, normalize_dims, reduction
from workbench.tensors.dispatch.registry import Call, Resolution, rule

_OF_A_MATRIX = """
linalg_cholesky linalg_cholesky_ex linalg_inv linalg_inv_ex linalg_det linalg_slogdet linalg_eig linalg_eigh
linalg_eigvals linalg_eigvalsh linalg_svd linalg_svdvals linalg_qr linalg_lu linalg_lu_factor linalg_lu_factor_ex
linalg_ldl_factor linalg_ldl_factor_ex linalg_matrix_exp linalg_matrix_power linalg_cond linalg_pinv
linalg_matrix_rank cholesky cholesky_inverse inverse pinverse det logdet slogdet qr svd lu matrix_exp matrix_power
geqrf
"""
_WITH_A_VECTOR = "linalg_householder_product lu_unpack"
_WHOLE = "WXYZ"

_FORGET_GRADIENTS = ("linalg_cond", "linalg_householder_product")
"""For an empty batch these have no gradient, and a rank without a gradient would let the others wait."""


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


@rule("linalg_matrix_norm")
def _matrix_norm(call: Call) -> Resolution | None:
    ndim = len(call.shapes[0])
    dims = normalize_dims(call.arg(2, "dim", (-2, -1)), ndim)
    return Resolution(reduction(ndim, dims, len(call.outputs[0][0]) == ndim, whole=True))


@rule("linalg_cross", "cross", "linalg_vecdot")
def _by_vectors(call: Call) -> Resolution | None:
    """Vectors along one dim: it stays whole in a cross product, and is summed in a dot product."""
    ndim = max(len(shape) for shape in call.shapes)
    dim = call.arg(2, "dim") if call.name == "cross" else call.kwargs.get("dim", -1)
    if dim is None:
        dim = next((d for d, size in enumerate(call.shapes[0]) if size == 3), -1)
    if call.name != "linalg_vecdot":
        text = along(ndim, dim, "X")
        # Without a dim, torch.cross takes the first dim of size 3. In a shard that may be another dim.
        pinned = None if call.name != "cross" else lambda *_: lambda x, y, *_, **__: torch.cross(x, y, dim=dim)
        return Resolution(f"{text}, {text} -> {text}", pinned)
    text = along(ndim, dim, "x")
    return Resolution(f"{text}, {text} -> {text.replace('x', '')}")


@rule("linalg_vander")
def _vander(call: Call) -> Resolution:
    """Default number of powers: the logical length of the vector."""
    num_powers = call.outputs[0][0][-1]
    return Resolution("... -> ...N", lambda *_: lambda x, *_, **__: torch.linalg.vander(x, N=num_powers))
