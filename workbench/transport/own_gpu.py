"""The device of a rank for which nobody names one: a GPU that no other rank of its host has, else the CPU.

A launcher may show all GPUs to every rank, or each rank its own (Slurm's ``--gpus-per-task``, a container per rank). No
variable says which. So every rank publishes the GPU that it would take, and all look for ranks that want the same.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from workbench.transport.launchers import launcher_value
from workbench.transport.rendezvous import Member, Rendezvous
from workbench.units import counted


def first_choice(rank: int) -> torch.device:
    """The GPU that a rank takes if no other one does; the CPU if it sees none.

    Without a launcher that numbers the ranks of a host, the rank itself counts.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", launcher_value("local_rank", rank) % torch.cuda.device_count())


def settle(rendezvous: Rendezvous, rank: int) -> Rendezvous:
    """The rendezvous with the devices that its members use; the first rank of a host warns if its GPUs stay unused."""
    before, after = rendezvous.members, settled(rendezvous.members)
    here = [peer for peer, member in enumerate(before) if member.host == before[rank].host]
    if [peer for peer in here if before[peer] != after[peer]][:1] == [rank]:
        seen = counted(len({before[peer].device for peer in here} - {"cpu"}), "GPU")
        warnings.warn(
            f"init(): the {len(here)} ranks of this host see {seen}, so their tensors lie on the CPU. Start one rank "
            'for each GPU, or let them share: wb.init(device="cuda").',
            stacklevel=3,
        )
    return replace(rendezvous, members=after)


def settled(members: Sequence[Member]) -> tuple[Member, ...]:
    """Ranks whose device is free work on the CPU where a rank of their host does, or where two would share a GPU.

    >>> first, second = (Member("node1", pid, 0, f"cuda GPU-{pid}", is_free=True) for pid in (1, 2))
    >>> [member.device for member in settled([first, second])]
    ['cuda GPU-1', 'cuda GPU-2']
    >>> [member.device for member in settled([first, first])]
    ['cpu', 'cpu']
    """
    users = Counter((each.host, each.device) for each in members)
    full = {each.host for each in members if each.device == "cpu" or users[each.host, each.device] > 1}
    return tuple(replace(each, device="cpu") if each.is_free and each.host in full else each for each in members)
