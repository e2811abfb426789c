"""``flow.save`` and ``flow.load``: whole values in one file, which any number of ranks can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from workbench.flow.local_tensor import local
from workbench.flow.world_join import join
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.world import barrier


def save(obj: Any, path: str | Path, global_dst_rank: int = 0) -> None:
    """Write tensors, and containers of them, with their logical values. All ranks of the world call it.

    An optimizer's state is not for this: each rank holds its part of it. ``wb.checkpoint.save`` writes that.

    Args:
        obj: e.g. ``module.state_dict()``.
        path: the file; one rank writes it.
        global_dst_rank: that rank.
    """
    world = join()
    whole = tree_map(_whole, obj)
    if world.rank == global_dst_rank:
        torch.save(whole, path)
    barrier()


def load(path: str | Path, global_src_rank: int | None = None) -> Any:
    """What ``save`` wrote, as local tensors; every rank reads the file.

    ``module.load_state_dict`` takes it, whatever the layouts of the module's parameters. ``global_src_rank`` is
    accepted and not needed.
    """
    return tree_map(lambda leaf: local(leaf) if isinstance(leaf, torch.Tensor) else leaf, torch.load(path))


def _whole(leaf: Any) -> Any:
    if isinstance(leaf, GlobalTensor):
        return value_on_all_ranks(leaf)
    return leaf.detach().as_subclass(torch.Tensor) if isinstance(leaf, torch.Tensor) else leaf
