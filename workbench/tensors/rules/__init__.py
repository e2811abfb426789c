"""The rules of torch's functions, a folder per family. Importing this package registers them all.

To add a function: one line in the family's file (an equation), or a function that returns a ``Resolution``. Families
share `reduction/across` (reductions over split dims), `reduction/shards` (empty shards) and `views/rows` (moving rows
along a split dim).
"""

from workbench.tensors.rules.attention import attention, multihead
from workbench.tensors.rules.convolution import convolution, pooling
from workbench.tensors.rules.indexing import along, assigning, embedding, indexing, picking
from workbench.tensors.rules.losses import cross_entropy, loss
from workbench.tensors.rules.matmul import experts, linalg, lowrank, matmul, recurrent, spectral
from workbench.tensors.rules.norms import norms
from workbench.tensors.rules.pointwise import creation, foreach, metadata, pointwise
from workbench.tensors.rules.random import dropout, initializers, randomness
from workbench.tensors.rules.reduction import cumulative, exponentials, extrema, moments, reduction, vector_norms
from workbench.tensors.rules.views import chunked, joining, rearranging, reshaping, view

__all__ = [
    "along", "assigning", "attention", "chunked", "convolution", "creation", "cross_entropy", "cumulative",
    "dropout", "embedding", "experts", "exponentials", "extrema", "foreach", "indexing", "initializers", "joining",
    "linalg", "loss", "lowrank", "matmul", "metadata", "moments", "multihead", "norms", "picking", "pointwise",
    "pooling", "randomness", "rearranging", "recurrent", "reduction", "reshaping", "spectral", "vector_norms",
    "view",
]  # fmt: skip
