"""Function rules by family. Importing this package installs them in ``GlobalTensor``.

To add a function: one line in the family's file (an equation), or a function that returns a ``Resolution``.
"""

from workbench.runtime.ops import (
    autograd,
    dispatch,
    layers,
    loss,
    matmul,
    metadata,
    norms,
    pointwise,
    randomness,
    reading,
    reduction,
    view,
)

__all__ = [
    "autograd", "dispatch", "layers", "loss", "matmul", "metadata", "norms", "pointwise", "randomness",
    "reading", "reduction", "view",
]  # fmt: skip
