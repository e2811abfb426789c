"""ZeRO as a choice of sbp.

`install_units` chooses what the three degrees split and which blocks gather together. `sharded_units` makes parameters
whole around a block. `gathered_call` keeps what backward needs of such a call. `gather_scatter` is the exchange as one
differentiable function.
"""
