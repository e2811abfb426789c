"""Executes boxings on a rank.

`box` runs a plan or a path as one differentiable function. `exchange` is one of its steps, compiled for this rank,
and makes a shard of the slices that arrive. `fused` boxes several tensors in one exchange, or waits for the
result later. `explicit` refuses boxings that the code does not write. `calibration` measures the cost of exchanges.
"""
