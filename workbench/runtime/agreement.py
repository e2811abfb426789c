"""Do all ranks hold the same weights? One small exchange answers, and names the first parameter that differs."""

from __future__ import annotations

import torch
from torch import nn

from workbench.errors import LayoutError
from workbench.runtime.entry import content_hash
from workbench.runtime.tensor import GlobalTensor
from workbench.runtime.world import World


def check_same_everywhere(module: nn.Module, world: World) -> None:
    """Raise ``LayoutError`` if the plain parameters and buffers of ``module`` differ between ranks. All
    ranks call it.
    """
    if world.world_size == 1:
        return
    named = [
        (n, t) for n, t in (*module.named_parameters(), *module.named_buffers()) if not isinstance(t, GlobalTensor)
    ]
    mine = torch.tensor([content_hash(tensor) for _, tensor in named], dtype=torch.int64, device=world.device)
    total = torch.stack([torch.tensor(len(named), device=world.device), mine.sum()])
    totals = world.transport.all_gather(total, "parallelize")
    counts = {int(t[0]) for t in totals}
    if len(counts) > 1:
        raise LayoutError(
            f"parallelize: the ranks hold {sorted(counts)} parameters and buffers. All ranks build the same model."
        )
    if len({int(t[1]) for t in totals}) == 1:
        return
    hashes = world.transport.all_gather(mine, "parallelize")
    for index, (name, _) in enumerate(named):
        values = [int(h[index]) for h in hashes]
        if len(set(values)) > 1:
            odd = next(rank for rank, value in enumerate(values) if value != values[0])
            raise LayoutError(
                f"parallelize: {name!r} differs between rank 0 and rank {odd}. All ranks start from the same weights: "
                "call wb.manual_seed(0) on all ranks before building the model, or load the same checkpoint."
            )
