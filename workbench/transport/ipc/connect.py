"""Connection of GPU ranks of one host over ``ipc``: each rank opens its peers' memory and reads known bytes from it.

All ranks take part and find the same result. A rank that cannot read a peer's device memory gets the data through
memory of the host. The world cannot use ``ipc`` only if two ranks cannot share host memory either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.errors import WorldError
from workbench.transport.ipc.cuda import CudaDevice, first_line
from workbench.transport.ipc.device import Device
from workbench.transport.ipc.events import EventWaiter, LocalEvents, PeerEvents
from workbench.transport.ipc.handles import HANDLE_TABLE_BYTES, NUM_EVENTS, ON_DEVICE, ON_HOST, HandleTable
from workbench.transport.ipc.pool import FIRST_CHUNK_BYTES, PeerMemory, Pool, free_deferred
from workbench.transport.ipc.transfers import Peer, Transfers
from workbench.transport.ipc.transport import IpcTransport
from workbench.transport.messaging.connect import (
    GatherBytes,
    PageAddress,
    all_gather_json,
    make_control_page,
    open_links,
)
from workbench.transport.messaging.control_page import ControlPage
from workbench.transport.messaging.link import Link
from workbench.transport.messaging.semaphores import load
from workbench.transport.peer_processes import PeerProcesses

DEVICE_TYPES: dict[str, Callable[[torch.device], Device]] = {"cuda": CudaDevice}
"""The ``Device`` class, by type of the torch device."""
_PATTERN_BYTES = 4096
_EVENT_S = 5.0


@dataclass
class Connection:
    """The result of ``connect``.

    Attributes:
        transport: None where a rank has refused.
        refusals: reasons, by rank.
        staged: by (sender, reader), the reason why the reader gets its data through memory of the host.
    """

    transport: IpcTransport | None
    refusals: dict[int, str]
    staged: dict[tuple[int, int], str] = field(default_factory=dict)


def connect(gather: GatherBytes, rank: int, world_size: int, timeout_s: float, device: torch.device) -> Connection:
    """Connect the ranks of a world, which all run on one host, each on a device of ``DEVICE_TYPES``."""
    free_deferred()
    made, refusal = _make(rank, world_size, device)
    mine = made.address if made is not None else PageAddress(0, 0, 0)
    replies = all_gather_json(gather, {"pid": mine.pid, "file": mine.file, "token": mine.token, "refusal": refusal})
    refusals = {peer: found["refusal"] for peer, found in enumerate(replies) if found["refusal"]}
    addresses = {peer: PageAddress(found["pid"], found["file"], found["token"]) for peer, found in enumerate(replies)}
    attempt = _Attempt(made, addresses, rank, world_size) if made is not None and not refusals else None
    replies = all_gather_json(gather, attempt.try_all(ON_DEVICE) if attempt else {"refusal": "", "without_events": []})
    refusals |= {peer: found["refusal"] for peer, found in enumerate(replies) if found["refusal"]}
    staged = _unreadable(replies)
    if attempt is not None:
        attempt.disable_events({sender for found in replies for sender in found["without_events"]})
    if staged and not refusals:
        assert attempt is not None
        replies = all_gather_json(gather, attempt.prepare_host([reader for sender, reader in staged if sender == rank]))
        replies = all_gather_json(gather, attempt.try_all(ON_HOST, [s for s, reader in staged if reader == rank]))
        refusals |= {peer: found["refusal"] for peer, found in enumerate(replies) if found["refusal"]}
        refusals |= {reader: f"of rank {sender}: {why}" for (sender, reader), why in _unreadable(replies).items()}
    if attempt is None or refusals:
        if attempt is not None:
            attempt.close()
        elif made is not None:
            made.close({}, PeerProcesses({}))
        return Connection(None, refusals)
    return Connection(attempt.transport(staged, timeout_s), {}, staged)


def _unreadable(replies: Sequence[dict[str, Any]]) -> dict[tuple[int, int], str]:
    pairs = [(reader, found.get("unreadable", {})) for reader, found in enumerate(replies)]
    return {(int(sender), reader): why for reader, senders in pairs for sender, why in senders.items()}


@dataclass
class _LocalState:
    """The resources that a rank creates before it knows its peers."""

    page: ControlPage
    handle_table: HandleTable
    pool: Pool
    events: LocalEvents
    address: PageAddress

    def close(self, peers: Mapping[int, HandleTable], processes: PeerProcesses) -> None:
        """Free everything, as soon as ``peers`` have closed their parts of it."""
        self.handle_table.close()
        self.pool.free_when_unused(peers, processes)
        self.page.memory.close()


def _make(rank: int, world_size: int, torch_device: torch.device) -> tuple[_LocalState | None, str]:
    """A control page, a handle table, events and a first chunk with known bytes, or None and the reason."""
    if torch_device.type not in DEVICE_TYPES:
        return None, f"memory of {torch_device.type} devices is not shared between processes"
    found, refusal = make_control_page(rank, world_size, HANDLE_TABLE_BYTES)
    if found is None:
        return None, refusal
    (page, first), handle_table, pool = found, HandleTable(found[1]), None
    try:
        device = DEVICE_TYPES[torch_device.type](torch_device)
        pool = Pool(rank, device, handle_table)
        events = _make_events(device, handle_table)
        _write_pattern(pool, ON_DEVICE, page.token)
        events.record()
    except (WorldError, RuntimeError) as error:
        if pool is not None:
            pool.free_when_unused({}, PeerProcesses({}))
        for memory in (page.memory, first):
            memory.close()
        return None, first_line(error)
    return _LocalState(page, handle_table, pool, events, PageAddress(os.getpid(), page.memory.file, page.token)), ""


def _make_events(device: Device, handle_table: HandleTable) -> LocalEvents:
    events = [device.make_event() for _ in range(NUM_EVENTS)]
    try:
        handle_table.write_events([event.export() for event in events])
    except WorldError:
        return LocalEvents(events, are_shared=False)
    return LocalEvents(events, are_shared=True)


def _write_pattern(pool: Pool, kind: int, token: int) -> None:
    """Write known bytes at the start of a new chunk; nothing overwrites them before the peers have read them."""
    number = pool.grow(FIRST_CHUNK_BYTES, kind, f"rank {pool.rank} joins the world")
    pool.device.copy([pool.start_of(number, _PATTERN_BYTES)], [_pattern(token, pool.device)], [1], "none")
    pool.device.synchronize()


def _pattern(token: int, device: Device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(token)
    return torch.randint(256, (_PATTERN_BYTES,), generator=generator, dtype=torch.uint8).to(device.torch_device)


class _Attempt:
    """A rank that has opened its peers' control pages and tests which memory it can read."""

    def __init__(self, made: _LocalState, addresses: dict[int, PageAddress], rank: int, world_size: int) -> None:
        self.made, self.addresses, self.rank = made, addresses, rank
        self.links: dict[int, Link] = {}
        self.opened: dict[int, PeerMemory] = {}
        self.events: dict[int, PeerEvents] = {}
        self.refusal = ""
        self.without_events: list[int] = []
        """Ranks whose events this rank cannot open."""
        try:
            self.links = open_links(made.page, addresses, rank, world_size)
        except (OSError, WorldError) as error:
            self.refusal = f"cannot open the others' control pages: {error}"
        device = made.pool.device
        for peer, link in self.links.items():
            self.opened[peer] = PeerMemory(device, link.pid, HandleTable(link.memory(0)))

    def try_all(self, kind: int, senders: Sequence[int] | None = None) -> dict[str, Any]:
        """Read the pattern of every sender; return the senders whose memory this rank cannot read, with reasons."""
        unreadable = {}
        for peer in self.opened if senders is None else senders:
            try:
                if kind == ON_DEVICE:
                    self._open_events(peer)
                self._read_pattern(peer, kind)
            except (OSError, RuntimeError, WorldError) as error:
                unreadable[peer] = first_line(error)
        return {"refusal": self.refusal, "unreadable": unreadable, "without_events": self.without_events}

    def prepare_host(self, readers: Sequence[int]) -> dict[str, Any]:
        """Allocate memory of the host for readers that cannot read the device's memory."""
        try:
            if readers:
                _write_pattern(self.made.pool, ON_HOST, self.made.page.token)
        except WorldError as error:
            self.refusal = str(error)
        return {"refusal": self.refusal}

    def transport(self, staged: dict[tuple[int, int], str], timeout_s: float) -> IpcTransport:
        made, semaphores = self.made, load()
        assert semaphores is not None
        waiter = EventWaiter(self.rank, made.page, self.links, semaphores, timeout_s)
        peers = {
            peer: Peer(
                link, self.opened[peer], self.events[peer], ON_HOST if (self.rank, peer) in staged else ON_DEVICE
            )
            for peer, link in self.links.items()
        }
        transfers = Transfers(self.rank, made.pool, made.events, peers, waiter)
        return IpcTransport(self.rank, made.page, made.handle_table, transfers, waiter)

    def close(self) -> None:
        """Free everything, after a rank has refused."""
        for opened in self.opened.values():
            opened.close_all()
        peers = {peer: opened.handle_table for peer, opened in self.opened.items()}
        self.made.close(peers, PeerProcesses({peer: link.pid for peer, link in self.links.items()}))

    def disable_events(self, ranks: Collection[int]) -> None:
        """Let ``ranks`` wait for their own devices before they send, because a peer cannot open their events."""
        for peer in self.events.keys() & ranks:
            self.events[peer] = PeerEvents([])
        if self.rank in ranks:
            self.made.events.are_shared = False

    def _open_events(self, peer: int) -> None:
        device = self.made.pool.device
        self.events[peer] = PeerEvents([])
        try:
            events = [device.open_event(handle) for handle in self.opened[peer].handle_table.events()]
            self.events[peer] = PeerEvents(events)
        except WorldError:
            self.without_events.append(peer)

    def _read_pattern(self, peer: int, kind: int) -> None:
        device, end = self.made.pool.device, time.perf_counter() + _EVENT_S
        while not self.events[peer].is_done(1):
            if time.perf_counter() > end:
                raise WorldError(f"the first event of rank {peer} is not done after {_EVENT_S:g} s")
            time.sleep(1e-3)
        handle_table = self.opened[peer].handle_table
        number = handle_table.first_of(kind)
        found = torch.empty(_PATTERN_BYTES, dtype=torch.uint8, device=device.torch_device)
        device.copy([found], [self.opened[peer].view(number, 0, (_PATTERN_BYTES,), torch.uint8)], [1], "none")
        device.synchronize()
        if not torch.equal(found, _pattern(self.addresses[peer].token, device)):
            raise WorldError(f"memory of rank {peer} was opened, but other bytes were read than it has written")
