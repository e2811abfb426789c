"""Steps that raised: they leave local parts in the place of an optimizer's parameters until these are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World
from workbench.training.gradients.optim import put_back
from workbench.training.gradients.reduction import write_back


def end_failed_steps(optimizers: Sequence[Optimizer], world: World) -> None:
    """Return their parameters to those of the optimizers whose step raised. All ranks call it.

    If a rank was in such a step, all bring their shards of ZeRO to the others, whose copies may be older.
    """
    if not optimizers:
        return
    swaps = [vars(optimizer).get("_workbench_swap") for optimizer in optimizers]
    mine = [swap is not None and swap.held is not None for swap in swaps]
    failed = all_gather_object(mine, world, "steps that raised")
    for optimizer, of_ranks in zip(optimizers, zip(*failed, strict=True), strict=True):
        if any(of_ranks):
            put_back(optimizer, sends=False)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            with torch.no_grad(), local_torch():
                write_back(p for p in parameters if isinstance(p, GlobalTensor))
