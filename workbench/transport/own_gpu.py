"""The devices of ranks. Where nobody names one, each rank has a GPU that no other rank of its host has, or all ranks
work on the CPU.

A launcher may show all GPUs to every rank, or each rank its own (Slurm's ``--gpus-per-task``, a container per rank). No
variable says which. So every rank publishes the GPU that it would take, and all look for ranks that want the same.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from workbench.errors import WorldError
from workbench.transport.launchers import launcher_value
from workbench.transport.rendezvous import Member, Rendezvous
from workbench.units import counted, format_ranks


def choose(device: str | torch.device | None, rank: int, world_size: int) -> torch.device:
    """The device that a rank would take; None where nobody names one.

    A GPU without a number is the one that the program has set (``torch.cuda.set_device(2)``). Number 0 counts as not
    set: torch begins with it in every process, and the rank takes the one of its number on its host. The same holds for
    a rank that is alone and names no device.
    """
    named = torch.device("cuda" if device is None else device)
    if named != torch.device("cuda"):
        return named
    if device is None and (world_size > 1 or not torch.cuda.is_available()):
        return first_choice(rank)
    present = torch.cuda.current_device()
    return torch.device("cuda", present) if present else first_choice(rank)


def first_choice(rank: int) -> torch.device:
    """The GPU that a rank takes if no other one does; the CPU if it sees none.

    Without a launcher that numbers the ranks of a host, the rank itself counts.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", launcher_value("local_rank", rank) % torch.cuda.device_count())


def settle(
    rendezvous: Rendezvous, rank: int, chosen: torch.device, timeout_s: float
) -> tuple[Rendezvous, torch.device]:
    """The rendezvous with the devices that its members use, and this rank's device, now the present one of its process.

    Where free ranks work on the CPU though they have first chosen a GPU, the first of them warns.

    Raises:
        WorldError: ranks would work on devices of two types, or a rank cannot use its GPU; raised on all ranks.
    """
    before, after = rendezvous.members, settled(rendezvous.members)
    moved = [peer for peer in range(len(after)) if before[peer] != after[peer]]
    _check_types(after, f" ({_why_cpu(before)})" if moved else "")
    if moved[:1] == [rank]:
        warnings.warn(
            f"init(): {_why_cpu(before)}, so all ranks work on the CPU. Start one rank for each GPU, or let "
            'them share: wb.init(device="cuda").',
            stacklevel=3,
        )
    rendezvous = replace(rendezvous, members=after)
    if after[rank].device == "cpu":
        return rendezvous, torch.device("cpu")
    problem, cause = "", None
    try:
        chosen = use(chosen)
    except RuntimeError as error:
        problem, cause = f"{chosen}: {(str(error).strip() or 'no message').splitlines()[0]}", error
    problems = rendezvous.gather("devices", rank, range(len(after)), problem, timeout_s)
    found = [f"rank {peer} of {len(after)} cannot use {text}" for peer, text in enumerate(problems) if text]
    if found:
        raise WorldError(
            f"init(): {'; '.join(found)}. A world has all its ranks, so none goes on. End what else uses that GPU "
            '(nvidia-smi names it), or use another one: wb.init(device="cuda:1"), or device="cpu" on all ranks.'
        ) from cause
    return rendezvous, chosen


def settled(members: Sequence[Member]) -> tuple[Member, ...]:
    """The members with the devices that they use. Where one works on the CPU, or one whose device is free would share a
    GPU, all whose device is free work on the CPU: ranks on two types of device could not exchange.

    >>> first, second = (Member("node1", pid, 0, f"cuda GPU-{pid}", is_free=True) for pid in (1, 2))
    >>> [member.device for member in settled([first, second])]
    ['cuda GPU-1', 'cuda GPU-2']
    >>> [member.device for member in settled([first, first])]
    ['cpu', 'cpu']
    """
    if _first_without_gpu(members) is None:
        return tuple(members)
    return tuple(replace(each, device="cpu") if each.is_free else each for each in members)


def use(device: torch.device) -> torch.device:
    """Make a GPU the present one of this process: torch launches kernels, and NCCL sends, on the present one. A device
    without a number is the present one.
    """
    if device.type in ("cpu", "meta"):
        return device
    module = torch.get_device_module(device)
    number: int | None = device.index
    if number is None:
        return torch.device(device.type, module.current_device())
    module.set_device(number)
    return device


def _first_without_gpu(members: Sequence[Member]) -> int | None:
    users = Counter((each.host, each.device) for each in members)
    without = (each.device == "cpu" or (each.is_free and users[each.host, each.device] > 1) for each in members)
    return next((rank for rank, is_without in enumerate(without) if is_without), None)


def _why_cpu(members: Sequence[Member]) -> str:
    """Why ranks whose device is free work on the CPU."""
    rank = _first_without_gpu(members)
    assert rank is not None
    if not members[rank].is_free:
        return f'rank {rank} has device="cpu"'
    here = [each.device for each in members if each.host == members[rank].host]
    seen = counted(len({*here} - {"cpu"}), "GPU")
    return f"host {members[rank].host.split()[0]} shows {seen} to its {counted(len(here), 'rank')}"


def _check_types(members: Sequence[Member], why: str) -> None:
    types = [each.device.split()[0] for each in members]
    if len(set(types)) > 1:
        ranks = {kind: [rank for rank, each in enumerate(types) if each == kind] for kind in types}
        where = [f"rank{'s' * (len(each) > 1)} {format_ranks(each)} on {kind}" for kind, each in ranks.items()]
        raise WorldError(
            f"init(): {', '.join(where)}{why}. All ranks of a world work on one type of device. Name the same one for "
            'all: wb.init(device="cpu"), or device="cuda" where each rank sees a GPU.'
        )
