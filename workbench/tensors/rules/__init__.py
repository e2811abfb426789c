"""The rules of torch's functions, a folder per family. Importing this package registers them all.

To add a function, add one line to the family's file (an equation), or a function that returns a ``Resolution``.
Families share `reduction/two_stage` (reductions over split dims), `reduction/empty_shards` and `views/row_moves`
(moving rows along a split dim).
"""

# ruff: noqa: F401
from workbench.tensors.rules import operators, unlike_signatures
from workbench.tensors.rules.attention import attention, flex, multihead
from workbench.tensors.rules.convolution import convolution, pooling
from workbench.tensors.rules.indexing import assignment, embedding, gather_scatter, indexing
from workbench.tensors.rules.losses import cross_entropy, loss
from workbench.tensors.rules.matmul import float8, linalg, matmul, recurrent
from workbench.tensors.rules.norms import norms
from workbench.tensors.rules.pointwise import creation, metadata, pointwise
from workbench.tensors.rules.random import dropout, initializers, sampling
from workbench.tensors.rules.reduction import cumulative, extrema, reduction, softmax, variance, vector_norms
from workbench.tensors.rules.views import concatenation, in_place_views, rearranging, view
