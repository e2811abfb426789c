"""From gradients to a step of a plain torch optimizer.

`reduction` sums gradients in flat buckets, `overlap` starts that during backward; `shard` says which part of a
parameter a rank keeps, `shard_exchange` moves such parts; `clip` takes norms over all stages, `optim` puts local
parts in the place of parameters around a step.
"""
