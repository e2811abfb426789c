"""Which weights are large: micro-batches add to their gradients in place, and the cost model counts no second ones."""

SMALLEST_NUMEL = 2**20
"""Elements of a rank's part of a weight from which on it pays (4 MB in 32 bits)."""
