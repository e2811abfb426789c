"""A process group that a program makes after ``wb.init()``."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from workbench.errors import WorldError
from workbench.tensors import world as worlds
from workbench.tensors.patch_table import patch


def _of_the_world(init_process_group: Any) -> Any:
    @functools.wraps(init_process_group)
    def init(*args: Any, **kwargs: Any) -> None:
        init_process_group(*args, **kwargs)
        world, num_ranks = worlds._process_world, dist.get_world_size()
        if world is not None and world.world_size != num_ranks:
            dist.destroy_process_group()
            raise WorldError(
                f"init_process_group: {num_ranks} ranks, but wb.init() has made a world of {world.world_size} before, "
                "where each process trains alone. Leave init_process_group out: wb.init() makes the group. Without a "
                "launcher call wb.init(rank, world_size, init_method=...) in place of both."
            )

    return init


for _place in ("torch.distributed.init_process_group", "torch.distributed.distributed_c10d.init_process_group"):
    patch(_place, "each process of the group would be a world of one, and train alone", _of_the_world)
