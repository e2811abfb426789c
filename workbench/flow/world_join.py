"""Joining the world at first use: an eager program says ``from workbench import flow`` and no ``init()``."""

from __future__ import annotations

import os

from workbench.tensors.world import World, current, init, joined
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch


def join() -> World:
    """The world of this process; in one that a launcher has started, joined now if nothing has joined it before.

    All ranks get here, for they run the same program. A process that nobody launched is a world of its own.
    """
    if joined() is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return init()
    return current()


def join_if_launched() -> None:
    """What the modules of eager programs call when they are imported: weights must be made after the ranks have met.

    The ranks go on with one rank's random numbers from then on, so that their modules are equal.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join()
