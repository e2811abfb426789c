"""Function rules by family. Importing this package installs them in ``GlobalTensor``.

To add a function: one line in the family's file (an equation), or a function that returns a ``Resolution``.
"""

from workbench.runtime.ops import (
    attention,
    autograd,
    convolution,
    dispatch,
    embedding,
    loss,
    matmul,
    metadata,
    norms,
    pointwise,
    pooling,
    randomness,
    reading,
    reduction,
    view,
)

__all__ = [
    "attention", "autograd", "convolution", "dispatch", "embedding", "loss", "matmul", "metadata", "norms",
    "pointwise", "pooling", "randomness", "reading", "reduction", "view",
]  # fmt: skip
