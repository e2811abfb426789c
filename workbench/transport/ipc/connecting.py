"""GPU ranks of one host become a world over ``ipc``: each opens the others' memory and reads known bytes from it.

All ranks take part and come to the same answer. What a rank cannot read where it lies comes to it through memory of the
host; only ranks that cannot share host memory either keep the world from using ``ipc``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from workbench.errors import WorldError
from workbench.transport.ipc.catalogue import CATALOGUE_BYTES, NUM_EVENTS, ON_DEVICE, ON_HOST, Catalogue
from workbench.transport.ipc.cuda import CudaDevice
from workbench.transport.ipc.device import Device
from workbench.transport.ipc.marks import Marks, MarkWaiter, PeerMarks
from workbench.transport.ipc.parcels import Parcels, Peer
from workbench.transport.ipc.pool import FIRST_CHUNK_BYTES, Opened, Pool, reap
from workbench.transport.ipc.transport import IpcTransport
from workbench.transport.letters.board import Board
from workbench.transport.letters.connecting import Gather, make_board, open_links, tell
from workbench.transport.letters.link import Link
from workbench.transport.letters.semaphores import load
from workbench.transport.processes import Processes

MAKERS: dict[str, Callable[[torch.device], Device]] = {"cuda": CudaDevice}
"""What makes a ``Device`` of a torch device, by its type."""
_PATTERN_BYTES = 4096
_MARK_S = 5.0


class _Place(NamedTuple):
    pid: int
    file: int
    token: int


@dataclass
class Connection:
    """What came of it.

    Attributes:
        transport: None where some rank has refused.
        refusals: why, by rank.
        staged: by (sender, reader), why the reader gets its data through memory of the host.
    """

    transport: IpcTransport | None
    refusals: dict[int, str]
    staged: dict[tuple[int, int], str] = field(default_factory=dict)


def connect(gather: Gather, rank: int, world_size: int, timeout_s: float, device: torch.device) -> Connection:
    """Connect the ranks of a world, all of one host and each on a device that ``MAKERS`` knows."""
    reap()
    made, refusal = _make(rank, world_size, device)
    mine = made.place if made is not None else _Place(0, 0, 0)
    told = tell(gather, {"pid": mine.pid, "file": mine.file, "token": mine.token, "refusal": refusal})
    refusals = {peer: found["refusal"] for peer, found in enumerate(told) if found["refusal"]}
    places = {peer: _Place(found["pid"], found["file"], found["token"]) for peer, found in enumerate(told)}
    attempt = _Attempt(made, places, rank, world_size) if made is not None and not refusals else None
    told = tell(gather, attempt.try_all(ON_DEVICE) if attempt else {"refusal": "", "unmarked": []})
    refusals |= {peer: found["refusal"] for peer, found in enumerate(told) if found["refusal"]}
    staged = _unreadable(told)
    if attempt is not None:
        attempt.forget_marks({sender for found in told for sender in found["unmarked"]})
    if staged and not refusals:
        assert attempt is not None
        told = tell(gather, attempt.prepare_host([reader for sender, reader in staged if sender == rank]))
        told = tell(gather, attempt.try_all(ON_HOST, [s for s, reader in staged if reader == rank]))
        refusals |= {peer: found["refusal"] for peer, found in enumerate(told) if found["refusal"]}
        refusals |= {reader: f"of rank {sender}: {why}" for (sender, reader), why in _unreadable(told).items()}
    if attempt is None or refusals:
        if attempt is not None:
            attempt.close()
        elif made is not None:
            made.close({}, Processes({}))
        return Connection(None, refusals)
    return Connection(attempt.transport(staged, timeout_s), {}, staged)


def _unreadable(told: Sequence[dict[str, Any]]) -> dict[tuple[int, int], str]:
    pairs = [(reader, found.get("unreadable", {})) for reader, found in enumerate(told)]
    return {(int(sender), reader): why for reader, senders in pairs for sender, why in senders.items()}


@dataclass
class _Made:
    """What a rank has made before it knows the others."""

    board: Board
    catalogue: Catalogue
    pool: Pool
    marks: Marks
    place: _Place

    def close(self, peers: MappingOf[int, Catalogue], processes: Processes) -> None:
        """Give everything back, as soon as ``peers`` have closed what they have opened of it."""
        self.catalogue.close()
        self.pool.bury(peers, processes)
        self.board.mapping.close()


def _make(rank: int, world_size: int, torch_device: torch.device) -> tuple[_Made | None, str]:
    """A board, a catalogue, events and a first chunk with known bytes in it, or why there are none."""
    if torch_device.type not in MAKERS:
        return None, f"memory of {torch_device.type} devices is not shared between processes"
    found, refusal = make_board(rank, world_size, CATALOGUE_BYTES)
    if found is None:
        return None, refusal
    (board, first), catalogue, pool = found, Catalogue(found[1]), None
    try:
        device = MAKERS[torch_device.type](torch_device)
        pool = Pool(rank, device, catalogue)
        marks = _make_marks(device, catalogue)
        _write_pattern(pool, ON_DEVICE, board.token)
        marks.record()
    except (WorldError, RuntimeError) as error:
        if pool is not None:
            pool.bury({}, Processes({}))
        for mapping in (board.mapping, first):
            mapping.close()
        return None, _first_line(error)
    return _Made(board, catalogue, pool, marks, _Place(os.getpid(), board.mapping.file, board.token)), ""


def _make_marks(device: Device, catalogue: Catalogue) -> Marks:
    events = [device.make_event() for _ in range(NUM_EVENTS)]
    try:
        catalogue.write_events([event.export() for event in events])
    except WorldError:
        return Marks(events, are_shared=False)
    return Marks(events, are_shared=True)


def _write_pattern(pool: Pool, kind: int, token: int) -> None:
    """At the start of a new chunk; nobody writes there before the ranks have read it."""
    number = pool.grow(FIRST_CHUNK_BYTES, kind, f"rank {pool.rank} joins the world")
    pool.device.copy([pool.start_of(number, _PATTERN_BYTES)], [_pattern(token, pool.device)], [1], "none")
    pool.device.synchronize()


def _pattern(token: int, device: Device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(token)
    return torch.randint(256, (_PATTERN_BYTES,), generator=generator, dtype=torch.uint8).to(device.torch_device)


class _Attempt:
    """A rank that has opened the others' boards and tries what it can read."""

    def __init__(self, made: _Made, places: dict[int, _Place], rank: int, world_size: int) -> None:
        self.made, self.places, self.rank = made, places, rank
        self.links: dict[int, Link] = {}
        self.opened: dict[int, Opened] = {}
        self.marks: dict[int, PeerMarks] = {}
        self.refusal = ""
        self.unmarked: list[int] = []
        """Ranks whose events this one cannot open."""
        try:
            self.links = open_links(made.board, places, rank, world_size)
        except (OSError, WorldError) as error:
            self.refusal = f"cannot open the others' boards: {error}"
        device = made.pool.device
        for peer, link in self.links.items():
            self.opened[peer] = Opened(device, link.pid, Catalogue(link.mapping(0)))

    def try_all(self, kind: int, senders: Sequence[int] | None = None) -> dict[str, Any]:
        """Read the pattern of every sender; what to tell about those whose memory this rank cannot read."""
        unreadable = {}
        for peer in self.opened if senders is None else senders:
            try:
                if kind == ON_DEVICE:
                    self._open_marks(peer)
                self._read_pattern(peer, kind)
            except (OSError, RuntimeError, WorldError) as error:
                unreadable[peer] = _first_line(error)
        return {"refusal": self.refusal, "unreadable": unreadable, "unmarked": self.unmarked}

    def prepare_host(self, readers: Sequence[int]) -> dict[str, Any]:
        """Make memory of the host for those who cannot read the device's."""
        try:
            if readers:
                _write_pattern(self.made.pool, ON_HOST, self.made.board.token)
        except WorldError as error:
            self.refusal = str(error)
        return {"refusal": self.refusal}

    def transport(self, staged: dict[tuple[int, int], str], timeout_s: float) -> IpcTransport:
        made, semaphores = self.made, load()
        assert semaphores is not None
        waiter = MarkWaiter(self.rank, made.board, self.links, semaphores, timeout_s)
        peers = {
            peer: Peer(link, self.opened[peer], self.marks[peer], ON_HOST if (self.rank, peer) in staged else ON_DEVICE)
            for peer, link in self.links.items()
        }
        parcels = Parcels(self.rank, made.pool, made.marks, peers, waiter)
        return IpcTransport(self.rank, made.board, made.catalogue, parcels, waiter)

    def close(self) -> None:
        """Some rank has refused."""
        for opened in self.opened.values():
            opened.close_all()
        peers = {peer: opened.catalogue for peer, opened in self.opened.items()}
        self.made.close(peers, Processes({peer: link.pid for peer, link in self.links.items()}))

    def forget_marks(self, silent: Collection[int]) -> None:
        """These ranks wait for their own devices before they send: some other rank cannot open their events."""
        for peer in self.marks.keys() & silent:
            self.marks[peer] = PeerMarks([])
        if self.rank in silent:
            self.made.marks.are_shared = False

    def _open_marks(self, peer: int) -> None:
        device = self.made.pool.device
        self.marks[peer] = PeerMarks([])
        try:
            events = [device.open_event(handle) for handle in self.opened[peer].catalogue.events()]
            self.marks[peer] = PeerMarks(events)
        except WorldError:
            self.unmarked.append(peer)

    def _read_pattern(self, peer: int, kind: int) -> None:
        device, end = self.made.pool.device, time.perf_counter() + _MARK_S
        while not self.marks[peer].is_done(1):
            if time.perf_counter() > end:
                raise WorldError(f"the first event of rank {peer} is not done after {_MARK_S:g} s")
            time.sleep(1e-3)
        catalogue = self.opened[peer].catalogue
        number = catalogue.first_of(kind)
        found = torch.empty(_PATTERN_BYTES, dtype=torch.uint8, device=device.torch_device)
        device.copy([found], [self.opened[peer].view(number, 0, (_PATTERN_BYTES,), torch.uint8)], [1], "none")
        device.synchronize()
        if not torch.equal(found, _pattern(self.places[peer].token, device)):
            raise WorldError(f"memory of rank {peer} was opened, but other bytes were read than it has written")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
