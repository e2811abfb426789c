"""``flow.env``: this process's number, and the number of processes."""

from __future__ import annotations

import os

from workbench.flow.world_join import join


def init() -> None:
    """Join the world; programs need not call it."""
    join()


def get_rank() -> int:
    """This process's number in the world."""
    return join().rank


def get_world_size() -> int:
    """The number of processes in the world."""
    return join().world_size


def get_local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", get_rank()))


def get_node_size() -> int:
    """The number of machines in the world, if each has as many processes as this one."""
    size = get_world_size()
    return max(1, size // int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def is_multi_client() -> bool:
    """Whether every process runs the whole program; always, in eager programs."""
    return True
