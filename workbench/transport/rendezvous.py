"""Rendezvous of the ranks of a world: a key-value store of torch.distributed, and the members that have joined.

One init method serves several worlds, one after the other. Each world is a *generation* with keys of its own, so that
the keys of a broken world do not disturb the next one.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from workbench.errors import WorldError
from workbench.transport.held_interrupt import HeldInterrupt

HOST_VARIABLE = "WORKBENCH_HOST"
"""Overrides the name of this rank's host: ranks of hosts with different names never share memory."""
_DECISION, _GO_ON = "decision", "all go on"
_FIRST_NAP_S, _LONGEST_NAP_S = 1e-3, 50e-3
_last: tuple[str, Store] | None = None
_num_joined: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a world: its host, its process, and the process namespace.

    Attributes:
        device: the name of its device in all processes of the host: ``cpu``, ``cuda GPU-5a...``.
        requested: the transport that it requests; ``auto`` if none.
        is_free: nobody has named the device: it is the rank's first choice (see ``own_gpu``).
    """

    host: str
    pid: int
    namespace: int
    device: str = "cpu"
    requested: str = "auto"
    is_free: bool = False


@dataclass(frozen=True)
class Rendezvous:
    """The store of one generation, and its members by rank."""

    store: Store
    generation: int
    members: tuple[Member, ...]

    def pids_beside(self, rank: int) -> dict[int, int]:
        """By rank, the processes of its host that it can see, without its own."""
        own = self.members[rank]
        return {
            peer: member.pid
            for peer, member in enumerate(self.members)
            if peer != rank and (member.host, member.namespace) == (own.host, own.namespace)
        }

    def make_gather(self, rank: int, timeout_s: float) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        """A function that all-gathers bytes before there is a transport; every rank calls it equally often."""
        numbers = itertools.count()

        def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            own, ranks = bytes(tensor.tolist()).hex(), range(len(self.members))
            texts = self.gather(f"init(), part {next(numbers)}", rank, ranks, own, timeout_s)
            return [torch.tensor([*bytes.fromhex(text)], dtype=torch.uint8) for text in texts]

        return gather

    def gather(
        self,
        name: str,
        rank: int,
        ranks: Sequence[int],
        text: str,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """The texts of ``ranks``, each of which calls this with its own; a name serves once. ``meanwhile`` is called
        again and again, and may raise to end the wait.
        """
        self.store.set(f"{name}/{rank}", text)
        keys = [f"{name}/{peer}" for peer in ranks]
        _wait_for_all(self.store, keys, f"rank {rank} in {name}", timeout_s, meanwhile)
        return [self.store.get(key).decode() for key in keys]

    def sub_store(self, name: str) -> Store:
        """A store with a key prefix for one purpose."""
        return PrefixStore(name, self.store)


def join_rendezvous(
    init_method: str,
    rank: int,
    world_size: int,
    generation: int | None,
    timeout_s: float,
    device: str = "cpu",
    requested: str = "auto",
    is_free: bool = False,
    interrupt: HeldInterrupt | None = None,
) -> Rendezvous:
    """Join a world and return when all ranks have joined; the wait can be interrupted.

    Then the ranks connect to one another, and wait in C++ for each other. So they decide together, by a key of the
    store that is set once, whether all go on: a rank that is interrupted leaves if it is the first to set it.

    Args:
        init_method: an init method of ``torch.distributed``: ``env://``, ``file://``, ``tcp://``.
        generation: the number of the world under this init method; default: how many this process has joined.
        device, requested, is_free: published about this rank (see ``Member``).
        interrupt: what is held back while this rank joins.

    Raises:
        WorldError: some ranks did not join in time (they are named), one was interrupted, or this rank has joined
            already.
        KeyboardInterrupt: an interrupt was held, and others can do without this rank.
    """
    generation = _num_joined.get(init_method, 0) if generation is None else generation
    store = PrefixStore(f"workbench-{generation}", _store_of(init_method, rank, world_size, timeout_s))
    if store.add(f"came/{rank}", 1) > 1:
        raise WorldError(
            f"rank {rank} of {world_size} is twice in generation {generation} of {init_method}. Each rank joins a "
            "generation once: give rebuild() or init() another init_method, or the generation that the others join."
        )
    _num_joined[init_method] = generation + 1
    store.set(f"member/{rank}", json.dumps(asdict(_own_member(device, requested, is_free))))
    keys = [f"member/{peer}" for peer in range(world_size)]
    who = f"rank {rank} of {world_size} at {init_method}"

    def leave_if_interrupted() -> None:
        if interrupt is not None and interrupt.has_come and _decide(store, f"rank {rank} was interrupted") != _GO_ON:
            interrupt.take()
            raise KeyboardInterrupt
        _check_decision(store, who)

    try:
        _wait_for_all(store, keys, who, timeout_s, leave_if_interrupted)
    except WorldError:
        if _decide(store, f"rank {rank} has waited for {timeout_s:g} s") != _GO_ON:
            raise
    _decide(store, _GO_ON)
    _check_decision(store, who)
    return Rendezvous(store, generation, tuple(Member(**json.loads(store.get(key))) for key in keys))


def _decide(store: Store, text: str) -> str:
    """What all ranks do when they have joined: the text of the first rank that calls this."""
    return store.compare_set(_DECISION, "", text).decode()


def _check_decision(store: Store, who: str) -> None:
    if store.check([_DECISION]) and (found := store.get(_DECISION).decode()) != _GO_ON:
        raise WorldError(f"{who}: {found} before all ranks had joined, so none of them goes on. Join again.")


def host_name() -> str:
    """The name of this host with its boot id (two hosts can have one name), unless the environment overrides it."""
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return named[:60]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()[:60]} {file.read().strip()}"
    except OSError:
        return socket.gethostname()[:60]


def _own_member(device: str, requested: str, is_free: bool) -> Member:
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return Member(host_name(), os.getpid(), namespace, device, requested, is_free)


def _store_of(init_method: str, rank: int, world_size: int, timeout_s: float) -> Store:
    """The store of an init method. The last one is kept, because rank 0 may serve it to the other ranks."""
    global _last
    if _last is None or _last[0] != init_method:
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            if init_method.startswith("tcp://"):
                store: Store = _tcp_store(init_method, rank, world_size, timeout)
            else:
                store, _, _ = next(rendezvous(init_method, rank, world_size, timeout=timeout))
        except (ValueError, OSError, DistNetworkError) as error:
            raise _no_store(init_method, rank, world_size, error) from error
        if init_method.startswith("env://") and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _part_of_this_start(store, rank, world_size, timeout_s)
        _last = (init_method, store)
    return _last[1]


def _no_store(init_method: str, rank: int, world_size: int, error: Exception) -> WorldError:
    named = [f"{name}={os.environ.get(name, '(not set)')}" for name in ("MASTER_ADDR", "MASTER_PORT")]
    place = f"{init_method} ({' '.join(named)})" if init_method.startswith("env://") else init_method
    return WorldError(
        f"init(): rank {rank} of {world_size} has no rendezvous at {place}: {str(error).splitlines()[0]} Rank 0 "
        "listens there, at a port that no other program has, and the other ranks connect to it. Name rank 0's host and "
        "another port on all ranks: torchrun --master-port 29501, or MASTER_ADDR=127.0.0.1 MASTER_PORT=29501."
    )


def _part_of_this_start(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """The part of torchrun's store that belongs to this start of the ranks; rank 0 returns when all others have it.

    torchrun starts all ranks again after a failure, and when hosts come or go. The keys of the former ranks, which have
    ended, stay in its store. Its count of restarts does not name the start, because each host has its own. So rank 0
    counts the starts, and the others ask for the number with a token that no former rank has used.
    """
    who = f"rank {rank} of {world_size} under torchrun"
    if rank > 0:
        answer = f"{uuid.uuid4().hex}/0"
        store.set(f"asks/{rank}", answer)
        _wait_for_all(store, [answer], who, timeout_s)
        part = PrefixStore(f"start-{int(store.get(answer))}", store)
        part.set(f"has/{rank}", "")
        return part
    number = store.add("starts", 1)
    part = PrefixStore(f"start-{number}", store)

    def answer_all() -> None:
        for question in (f"asks/{peer}" for peer in range(1, world_size)):
            if store.check([question]):
                store.set(store.get(question).decode(), str(number))

    _wait_for_all(part, [f"has/{peer}" for peer in range(1, world_size)], who, timeout_s, answer_all)
    return part


def _tcp_store(init_method: str, rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """A TCP store that rank 0 serves at the given address only; torch's own listens on all interfaces."""
    place = urlsplit(init_method)
    if not place.hostname or not place.port:
        raise WorldError(
            f"init_method={init_method!r}: a TCP store needs an address of rank 0's host and a free port there, e.g. "
            f"tcp://10.0.0.1:29500."
        )
    address, serves = (place.hostname, place.port), rank == 0
    kinds = {found[0] for found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)} if serves else set()
    family = socket.AF_INET6 if kinds == {socket.AF_INET6} else socket.AF_INET
    file = socket.create_server(address, family=family).detach() if serves else None
    return TCPStore(*address, world_size, serves, timeout, wait_for_workers=False, master_listen_fd=file)


def _wait_for_all(
    store: Store, keys: list[str], who: str, timeout_s: float, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Wait for keys that end with the rank that sets them; ``meanwhile`` is called again and again."""
    started, nap_s = time.perf_counter(), _FIRST_NAP_S
    while not store.check(keys):
        meanwhile()
        if time.perf_counter() - started > timeout_s:
            missing = [int(key.rpartition("/")[2]) for key in keys if not store.check([key])]
            raise WorldError(
                f"{who}: {len(keys) - len(missing)} of {len(keys)} ranks came within {timeout_s:g} s, ranks {missing} "
                "did not. All ranks join the same init method and generation; check that they run."
            )
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
