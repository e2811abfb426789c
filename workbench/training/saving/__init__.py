"""Checkpoints: saved slice by slice under one strategy, loaded under any other.

`store` is ``wb.checkpoint.save`` and ``wb.checkpoint.load``, `checkpoints` a directory of checkpoints. `parts` chooses
the entries of modules and optimizers, and `optimizers` gives their state a form that can be split again. `writing` and
`reading` are the files, in the format of torch.distributed.checkpoint. `peer_copies` is a checkpoint in memory: what
ranks still hold after another one was lost.
"""
