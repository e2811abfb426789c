"""Whether this process runs a program together with other ranks, or drives engines."""

from __future__ import annotations

import os

from workbench.flow.world_join import join_if_launched
from workbench.tensors import world as worlds
from workbench.tensors.world import World


def launched_world() -> World | None:
    """The world in which this thread or process runs one program with other ranks: simulated, launched, or in a
    session. None for a process of its own, also if it has a world of one rank.
    """
    join_if_launched()
    world = worlds.joined()
    is_alone = world is worlds._process_world and "RANK" not in os.environ and (world is None or world.world_size == 1)
    return None if is_alone else worlds.current()
