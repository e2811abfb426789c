"""Checkpoints: saved slice by slice under one strategy, loaded under any other.

`store` is ``wb.checkpoint.save`` and ``wb.checkpoint.load``, `checkpoints` a directory of them. `parts` chooses what of
a module or an optimizer is saved, and `optimizers` brings state into a form that can be cut anew. `writing` and
`reading` are the files, in the format of torch.distributed.checkpoint.
"""
