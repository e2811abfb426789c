"""Low-rank approximations of whole matrices. The random directions depend on the logical shape only."""

from __future__ import annotations

from typing import Any

import torch

from workbench.tensors import random
from workbench.tensors.boxing.box import box_implicitly
from workbench.tensors.dispatch.registry import composite
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.rules.random.sampling import sample_of_shape


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
