"""Ranks that are threads of one process."""

from __future__ import annotations

import torch

from workbench.tensors import patch_table as patches
from workbench.tensors.world import World, thread_world
from workbench.transport.threads import ThreadHub, ThreadTransport


class Simulated:
    """Context: this thread is one rank of a simulated world (see ``workbench.testing.run_ranks``)."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __enter__(self) -> World:
        self.previous = getattr(thread_world, "world", None)
        thread_world.world = self.world
        patches.install()
        return self.world

    def __exit__(self, *exc: object) -> None:
        patches.remove()
        thread_world.world = self.previous


def world_of_one(device: torch.device) -> World:
    """A world whose only rank is this one: what runs in it has the layouts and random numbers of a strategy."""
    return World(0, 1, device, ThreadTransport(ThreadHub(1), 0, device))
