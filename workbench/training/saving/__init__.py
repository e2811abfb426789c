"""Checkpoints: saved slice by slice under one strategy, loaded under any other.

`store` is ``wb.checkpoint.save`` and ``wb.checkpoint.load``, `checkpoints` a directory of them; `parts` says what of
a module, an optimizer
and so on is saved, `optimizers` brings their state into a form that can be cut anew; `writing` and `reading` are the
files, in the format of torch.distributed.checkpoint; `chunks` shows torch a global tensor's slices.
"""
