"""ZeRO as a choice of sbp.

`units` says what the three degrees split and which blocks gather together; `unsharding` makes parameters whole
around a block, `gathered_call` is what backward needs of such a call, `gathering` the exchange as one
differentiable function.
"""
