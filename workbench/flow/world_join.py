"""Joins the world at first use: an eager program imports ``flow`` and calls no ``init()``. And says whether this
process runs a program together with other ranks, or drives engines.
"""

from __future__ import annotations

import os

from workbench.tensors import world as worlds
from workbench.tensors.world import World, current, init, joined
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch
from workbench.transport.launchers import launcher_value


def join() -> World:
    """The world of this process. If a launcher has started the process and it has no world yet, it joins one now.

    All ranks call this, because they run the same program. A process without a launcher is a world of one rank.
    """
    if joined() is None and launcher_value("world_size", 1) > 1:
        return init()
    return current()


def join_if_launched() -> None:
    """Join the world if a launcher has started this process.

    Modules of eager programs call it at their import, because a program must not make weights before the ranks have
    joined. From then on all ranks use one rank's random numbers, so that their modules are equal.
    """
    if launcher_value("world_size", 1) > 1:
        join()


def launched_world() -> World | None:
    """The world in which this thread or process runs one program with other ranks: simulated, launched, or in a
    session. None for a process of its own, also if it has a world of one rank.
    """
    join_if_launched()
    world = worlds.joined()
    is_alone = world is worlds._process_world and "RANK" not in os.environ and (world is None or world.world_size == 1)
    return None if is_alone else worlds.current()
