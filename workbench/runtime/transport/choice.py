"""Which transport the ranks of a world use: shared memory where all of them can, else torch.distributed.

All ranks take part and come to the same answer: every rank says what it could do, and one refusal is enough.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from workbench.errors import WorldError
from workbench.runtime.transport.base import Transport
from workbench.runtime.transport.board import Board
from workbench.runtime.transport.gloo import GlooTransport
from workbench.runtime.transport.link import Link
from workbench.runtime.transport.mapped import Mapping
from workbench.runtime.transport.meeting import host_name
from workbench.runtime.transport.mixed import MixedTransport
from workbench.runtime.transport.semaphores import load
from workbench.runtime.transport.shared import FIRST_CHUNK_BYTES, SharedTransport

VARIABLE = "WORKBENCH_TRANSPORT"
Gather = Callable[[torch.Tensor], list[torch.Tensor]]
"""Collects equally shaped CPU tensors of all ranks, by rank."""
_MESSAGE_BYTES = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others: why it cannot share memory, or where its board lies."""

    host: str = ""
    pid: int = 0
    file: int = 0
    token: int = 0
    refusal: str = ""
    wanted: str = "auto"


@dataclass(frozen=True)
class Group:
    """Which ranks talk over what, and why that."""

    ranks: tuple[int, ...]
    transport: str
    why: str

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}: {self.transport} ({self.why})"


def choose(other: Transport, gather: Gather, rank: int, world_size: int, timeout_s: float) -> Transport:
    """Shared memory where all ranks can and may use it, inside each host if there are several, else ``other``.

    All ranks call it. The environment variable WORKBENCH_TRANSPORT says ``shared`` or ``mixed`` (an error where some
    ranks, or some ranks of one host, cannot share memory), or ``gloo``. ``groups`` of the result tells which ranks use
    what, and why.

    Raises:
        WorldError: a rank asks for shared memory, and some rank cannot have it; on all ranks.
    """
    shared, refusals, offers = connect(gather, rank, world_size, timeout_s)
    hosts = list(dict.fromkeys(offer.host for offer in offers))
    asked = {offer.wanted for offer in offers} & {"shared", "mixed"}
    if "shared" in asked:
        elsewhere = [peer for peer, offer in enumerate(offers) if offer.host != offers[0].host]
        refusals |= {peer: f"it runs on {offers[peer].host}, rank 0 on {offers[0].host}" for peer in elsewhere}
    if asked and refusals:
        if shared is not None:
            shared.close()
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in refusals.items())
        raise WorldError(
            f"{VARIABLE}={max(asked)}: {len(refusals)} of {world_size} ranks cannot share memory ({reasons}). It needs "
            f"CPU ranks of one Linux host that may see one another's processes. Unset {VARIABLE} to use gloo."
        )
    groups = _groups(offers, hosts, refusals, other.name)
    chosen: Transport = other
    if shared is not None and len(hosts) == 1:
        chosen = shared
    elif any(group.transport == "shared" for group in groups):
        assert isinstance(other, GlooTransport)
        with_shared = {rank for group in groups if group.transport == "shared" for rank in group.ranks}
        places = [offer.host if peer in with_shared else f"rank {peer}" for peer, offer in enumerate(offers)]
        chosen = MixedTransport(shared, other, places)
    chosen.groups = groups  # type: ignore[attr-defined]
    for group in groups:
        _log.info("%s", group)
    return chosen


def _groups(offers: list[_Offer], hosts: list[str], refusals: dict[int, str], other: str) -> tuple[Group, ...]:
    """By host, which ranks use what; then what is between the hosts."""
    groups = []
    against_all = [rank for rank, offer in enumerate(offers) if offer.wanted == "gloo"]
    for host in hosts:
        ranks = tuple(rank for rank, offer in enumerate(offers) if offer.host == host)
        refused = [f"rank {rank}: {refusals[rank]}" for rank in against_all or ranks if rank in refusals]
        if len(ranks) > 1:
            groups.append(
                Group(ranks, other if refused else "shared", "; ".join(refused) or f"one host, {host.split()[0]}")
            )
    if len(hosts) > 1:
        groups.append(Group(tuple(range(len(offers))), other, f"between {len(hosts)} hosts"))
    return tuple(groups)


def why_not_shared() -> str:
    """Why ranks of this host would not share memory; empty if nothing speaks against it."""
    if wanted_by_user() == "gloo":
        return f"{VARIABLE}=gloo"
    made, refusal = _make(0, 2)
    for mapping in (made[0].mapping, made[1]) if made else ():
        mapping.close()
    return refusal


def wanted_by_user() -> str:
    """The transport that the environment names: ``auto``, ``gloo``, ``shared`` or ``mixed``.

    Raises:
        WorldError: it names another one.
    """
    value = os.environ.get(VARIABLE, "auto")
    if value not in ("auto", "gloo", "shared", "mixed"):
        raise WorldError(f"{VARIABLE}={value}: there is no such transport. Use gloo, shared, mixed, or unset it.")
    return value


def connect(
    gather: Gather, rank: int, world_size: int, timeout_s: float
) -> tuple[SharedTransport | None, dict[int, str], list[_Offer]]:
    """The transport to the other ranks of this host, if there are any; why not, by rank; and what all have offered.

    All ranks of a host share memory or none of them does: one refusal is enough.
    """
    wanted = wanted_by_user()
    made, refusal = (None, f"{VARIABLE}=gloo") if wanted == "gloo" else _make(rank, world_size)
    file, token = (made[0].mapping.file, made[0].token) if made else (0, 0)
    offers = _tell(gather, _Offer(_host(), os.getpid(), file, token, refusal, wanted))
    refusals = {peer: offer.refusal for peer, offer in enumerate(offers) if offer.refusal}
    near = {peer: offer for peer, offer in enumerate(offers) if offer.host == offers[rank].host}
    may_share = all(offer.wanted != "gloo" for offer in offers) and not refusals.keys() & near.keys()
    transport: SharedTransport | None = None
    refusal = ""
    if made and may_share and len(near) > 1:
        try:
            transport = _open_all(made, near, rank, world_size, timeout_s)
        except (OSError, WorldError) as error:
            refusal = f"cannot open the others' memory: {error}"
    verdicts = _tell(gather, _Offer(refusal=refusal))
    refusals |= {peer: verdict.refusal for peer, verdict in enumerate(verdicts) if verdict.refusal}
    if transport is not None and refusals.keys() & near.keys():
        transport.close()
        return None, refusals, offers
    if transport is None and made:
        for mapping in (made[0].mapping, made[1]):
            mapping.close()
    return transport, refusals, offers


def _make(rank: int, world_size: int) -> tuple[tuple[Board, Mapping] | None, str]:
    """This rank's board and first chunk, or why it has none."""
    semaphores = load()
    if semaphores is None or not hasattr(os, "pidfd_open"):
        return None, "this system lacks shared semaphores or process files"
    what = f"rank {rank} of {world_size} joins the world"
    board_bytes = Board.size_for(world_size)
    try:
        first_chunk = Mapping.create(FIRST_CHUNK_BYTES, what)
        board = Board(Mapping.create(board_bytes, what), world_size)
        board.initialise(secrets.randbits(62), semaphores)
    except (OSError, WorldError) as error:
        return None, str(error)
    board.add_chunk(first_chunk)
    return (board, first_chunk), ""


def _open_all(
    made: tuple[Board, Mapping], offers: dict[int, _Offer], rank: int, world_size: int, timeout_s: float
) -> SharedTransport:
    semaphores = load()
    assert semaphores is not None
    board, first_chunk = made
    links = {}
    for peer, offer in offers.items():
        if peer == rank:
            continue
        theirs = Board(Mapping.open(offer.pid, offer.file, Board.size_for(world_size)), world_size)
        if theirs.token != offer.token:
            raise WorldError(f"process {offer.pid} is not rank {peer} (ranks in different containers?)")
        link = Link(rank, peer, offer.pid, board, theirs, semaphores)
        link.mapping(0)
        links[peer] = link
    return SharedTransport(rank, board, links, first_chunk, semaphores, timeout_s)


def _tell(gather: Gather, offer: _Offer) -> list[_Offer]:
    """Every rank's offer."""
    room = _MESSAGE_BYTES - 300
    fields = asdict(offer) | {"refusal": offer.refusal.encode("ascii", "replace").decode()[:room]}
    text = json.dumps(fields).encode()
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return [_Offer(**json.loads(bytes(part.tolist()).rstrip(b"\0"))) for part in gather(message)]


def _host() -> str:
    return host_name()
