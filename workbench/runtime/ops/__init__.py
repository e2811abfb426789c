"""Function rules by family. Importing this package installs them in ``GlobalTensor``.

To add a function: one line in the family's file (an equation), or a function that returns a ``Resolution``.
"""

from workbench.runtime.ops import autograd, dispatch, hooks, reading
from workbench.runtime.ops.rules import (
    along,
    assigning,
    attention,
    chunked,
    convolution,
    creation,
    cross_entropy,
    cumulative,
    dropout,
    embedding,
    experts,
    exponentials,
    extrema,
    foreach,
    indexing,
    initializers,
    joining,
    linalg,
    loss,
    lowrank,
    matmul,
    metadata,
    moments,
    multihead,
    norms,
    picking,
    pointwise,
    pooling,
    randomness,
    rearranging,
    recurrent,
    reduction,
    reshaping,
    spectral,
    vector_norms,
    view,
)

__all__ = [
    "along", "assigning", "attention", "autograd", "chunked", "convolution", "creation", "cross_entropy", "cumulative",
    "dispatch", "dropout", "embedding", "experts", "exponentials", "extrema", "foreach", "hooks", "indexing",
    "initializers", "joining", "linalg", "loss", "lowrank", "matmul", "metadata", "moments", "multihead",
    "norms", "picking", "pointwise", "pooling", "randomness", "reading", "rearranging", "recurrent",
    "reduction", "reshaping", "spectral", "vector_norms", "view",
]  # fmt: skip
