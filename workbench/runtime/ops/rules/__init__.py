"""The rules of torch's functions by family; ``workbench.runtime.ops`` loads them all.

To add a function: one line in the family's file (an equation), or a function that returns a ``Resolution``. `rows`,
`across` and `shards` are what families share: rows that move along a split dim, reductions over split dims, empty
shards.
"""
