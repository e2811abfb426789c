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
from workbench.tensors.object_collectives import all_gather_object, run_on_all_ranks
from workbench.tensors.torch_patches.saving import refuse_state_of_stages


def save(obj: Any, path: str | Path, global_dst_rank: int | None = None) -> None:
    """Write tensors, and containers of them, with their logical values. All ranks of the world call it.

    Args:
        obj: e.g. ``module.state_dict()``.
        path: the file. If ranks name different files, each is written.
        global_dst_rank: the rank that writes its file; default: the first of those that name the same one.

    Raises:
        LayoutError: an optimizer's state under a pipeline, of which each stage holds a part.
        TypeError: a module, graph or optimizer in place of its state.
    """
    world, what = join(), "flow.save()"
    if hasattr(obj, "state_dict"):
        raise TypeError(
            f"flow.save of a {type(obj).__name__}: it writes tensors, and containers of them. Give the state: "
            "flow.save(model.state_dict(), path)."
        )
    paths = all_gather_object(str(path), world, what)
    writer = paths.index(str(path)) if global_dst_rank is None else global_dst_rank
    run_on_all_ranks(lambda: refuse_state_of_stages(what, obj), world, what)
    whole = tree_map(_whole, obj)
    run_on_all_ranks(lambda: torch.save(whole, path) if world.rank == writer else None, world, what)


def load(path: str | Path, global_src_rank: int | None = None) -> Any:
    """The values in a file of ``save``, as local tensors on this rank's device. Every rank reads the file.

    ``module.load_state_dict`` accepts them for any layouts of the module's parameters. ``global_src_rank`` has no
    effect.
    """
    loaded = torch.load(path, map_location=join().device)
    return tree_map(lambda leaf: local(leaf) if isinstance(leaf, torch.Tensor) else leaf, loaded)


def _whole(leaf: Any) -> Any:
    if isinstance(leaf, GlobalTensor):
        return value_on_all_ranks(leaf)
    return leaf.detach().as_subclass(torch.Tensor) if isinstance(leaf, torch.Tensor) else leaf
