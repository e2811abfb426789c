"""Ranks that are threads of one process."""

from __future__ import annotations

from workbench.tensors import patch_table as patches
from workbench.tensors.world import World, thread_world


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
