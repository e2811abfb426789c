"""From gradients to a step of a plain torch optimizer.

`reduction` sums gradients in flat buckets, and `overlap` starts these sums during backward. `shard` chooses the part of
a parameter that a rank keeps. `clip` computes norms over all stages. `optim` puts local parts in place of parameters
around a step, and `state_dicts` names the parts in ``optimizer.state_dict()``.
"""
