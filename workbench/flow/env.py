"""``flow.env``: this process's number, and the number of processes."""

from __future__ import annotations

from workbench.flow.world_join import join
from workbench.transport.launchers import launcher_value


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
    return launcher_value("local_rank", get_rank())


def get_node_size() -> int:
    """The number of machines in the world, if each has as many processes as this one."""
    size = get_world_size()
    return max(1, size // launcher_value("local_world_size", size))


def is_multi_client() -> bool:
    """Whether every process runs the whole program; always, in eager programs."""
    return True
