"""ZeRO as a choice of sbp.

`sharded_units` chooses what the three degrees split and which blocks gather together, and makes parameters whole around
a block. `gathered_call` keeps what backward needs of such a call. `gather_scatter` is the exchange as one
differentiable function.
"""
