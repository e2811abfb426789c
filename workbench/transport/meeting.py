"""Where the ranks of a world meet: a key-value store of torch.distributed, and who has come to it.

One meeting place serves several worlds, one after the other: each is a *generation* with keys of its own, so that
what a broken world has left in the store does not disturb the next.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from workbench.errors import WorldError

HOST_VARIABLE = "WORKBENCH_HOST"
"""Names this rank's host in place of what the system says: ranks with different names never share memory."""
_FIRST_NAP_S, _LONGEST_NAP_S = 1e-3, 50e-3
_last: tuple[str, Store] | None = None
_num_joined: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a world: its host, its process there, and whose process numbers these are.

    Attributes:
        device: what it works on, by the name that all processes have for it: ``cpu``, ``cuda GPU-5a...``.
        wants: the transport that it was told to use; ``auto`` if none.
    """

    host: str
    pid: int
    namespace: int
    device: str = "cpu"
    wants: str = "auto"


@dataclass(frozen=True)
class Meeting:
    """A store with this generation's keys, and all members by rank."""

    store: Store
    generation: int
    members: tuple[Member, ...]

    def gather_by(self, rank: int, timeout_s: float) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        """What collects bytes of all ranks before they have a transport; every rank calls it equally often."""
        numbers = itertools.count()

        def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            name = f"gather/{next(numbers)}"
            self.store.set(f"{name}/{rank}", bytes(tensor.tolist()).hex())
            keys = [f"{name}/{peer}" for peer in range(len(self.members))]
            _wait_for_all(self.store, keys, f"rank {rank} of {len(keys)} in init()", timeout_s)
            return [torch.tensor([*bytes.fromhex(self.store.get(key).decode())], dtype=torch.uint8) for key in keys]

        return gather

    def sub_store(self, name: str) -> Store:
        """The store with keys of their own for one purpose."""
        return PrefixStore(name, self.store)


def meet(
    init_method: str,
    rank: int,
    world_size: int,
    generation: int | None,
    timeout_s: float,
    device: str = "cpu",
    wants: str = "auto",
) -> Meeting:
    """Return when all ranks have come; the wait can be interrupted.

    Args:
        init_method: as ``torch.distributed`` knows it: ``env://``, ``file://``, ``tcp://``.
        generation: which world of this meeting place; default the number of those that this process was in.
        device, wants: what the others are to know of this rank (see ``Member``).

    Raises:
        WorldError: some ranks have not come in time (they are named), or this rank is there already.
    """
    generation = _num_joined.get(init_method, 0) if generation is None else generation
    store = PrefixStore(f"workbench-{generation}", _store_of(init_method, rank, world_size, timeout_s))
    if store.add(f"came/{rank}", 1) > 1:
        raise WorldError(
            f"rank {rank} of {world_size} is twice in generation {generation} of {init_method}. Each rank joins a "
            "generation once: give rebuild() or init() another init_method, or the generation that the others join."
        )
    _num_joined[init_method] = generation + 1
    store.set(f"member/{rank}", json.dumps(asdict(_myself(device, wants))))
    keys = [f"member/{peer}" for peer in range(world_size)]
    _wait_for_all(store, keys, f"rank {rank} of {world_size} at {init_method}", timeout_s)
    return Meeting(store, generation, tuple(Member(**json.loads(store.get(key))) for key in keys))


def host_name() -> str:
    """Name of this host and of its boot (two hosts can have one name), unless the environment names it."""
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return named[:60]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()[:60]} {file.read().strip()}"
    except OSError:
        return socket.gethostname()[:60]


def _myself(device: str, wants: str) -> Member:
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return Member(host_name(), os.getpid(), namespace, device, wants)


def _store_of(init_method: str, rank: int, world_size: int, timeout_s: float) -> Store:
    """The store; the last one is kept, because rank 0 may be the one that serves it to the others."""
    global _last
    if _last is None or _last[0] != init_method:
        timeout = datetime.timedelta(seconds=timeout_s)
        if init_method.startswith("tcp://"):
            store: Store = _tcp_store(init_method, rank, world_size, timeout)
        else:
            store, _, _ = next(rendezvous(init_method, rank, world_size, timeout=timeout))
        _last = (init_method, store)
    return _last[1]


def _tcp_store(init_method: str, rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """A TCP store that rank 0 serves at the address that is named, and nowhere else: torch's listens everywhere."""
    place = urlsplit(init_method)
    if not place.hostname or not place.port:
        raise WorldError(
            f"init_method={init_method!r}: a TCP store needs an address of rank 0's host and a free port there, e.g. "
            f"tcp://10.0.0.1:29500."
        )
    if rank > 0:
        return TCPStore(place.hostname, place.port, world_size, False, timeout, wait_for_workers=False)
    listening = socket.create_server((place.hostname, place.port))
    return TCPStore(
        place.hostname,
        place.port,
        world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _wait_for_all(store: Store, keys: list[str], who: str, timeout_s: float) -> None:
    started, nap_s = time.perf_counter(), _FIRST_NAP_S
    while not store.check(keys):
        if time.perf_counter() - started > timeout_s:
            missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
            raise WorldError(
                f"{who}: {len(keys) - len(missing)} of {len(keys)} ranks came within {timeout_s:g} s, ranks {missing} "
                "did not. All ranks join at the same place and in the same generation; see that they run."
            )
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
