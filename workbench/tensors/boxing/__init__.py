"""Boxings as a rank executes them.

`box` runs a plan or a path as one differentiable function; `exchange` is one of its steps, compiled for this rank,
and `assembling` makes a shard of what arrives. `fused` sends many in one exchange, or now and waits later;
`explicit` refuses those that nobody wrote; `calibrating` measures what moving bytes costs here.
"""
