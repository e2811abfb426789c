"""Which transport the ranks of a world use: shared memory where all of them can, else torch.distributed.

All ranks take part and come to the same answer: every rank says what it could do, and one refusal is enough.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from workbench.errors import WorldError
from workbench.runtime.transport.base import Transport
from workbench.runtime.transport.board import Board
from workbench.runtime.transport.link import Link
from workbench.runtime.transport.mapped import Mapping
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
    must_share: bool = False


def choose(other: Transport, gather: Gather, rank: int, world_size: int, timeout_s: float) -> Transport:
    """Shared memory if all ranks can and may use it, else ``other``. All ranks call it.

    The environment variable WORKBENCH_TRANSPORT says ``shared`` (an error where it cannot be) or ``gloo``.

    Raises:
        WorldError: a rank asks for shared memory, and some rank cannot have it; on all ranks.
    """
    shared, refusals, must_share = connect(gather, rank, world_size, timeout_s)
    if shared is not None:
        return shared
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in refusals.items())
    if must_share:
        raise WorldError(
            f"{VARIABLE}=shared: {len(refusals)} of {world_size} ranks cannot share memory ({reasons}). It needs CPU "
            f"ranks of one Linux host that may see one another's processes. Unset {VARIABLE} to use gloo."
        )
    _log.info("ranks talk over %s: %s", other.name, reasons)
    return other


def wanted_by_user() -> str:
    """The transport that the environment names: ``auto``, ``gloo`` or ``shared``.

    Raises:
        WorldError: it names another one.
    """
    value = os.environ.get(VARIABLE, "auto")
    if value not in ("auto", "gloo", "shared"):
        raise WorldError(f"{VARIABLE}={value}: there is no such transport. Use gloo, shared, or unset it.")
    return value


def connect(
    gather: Gather, rank: int, world_size: int, timeout_s: float
) -> tuple[SharedTransport | None, dict[int, str], bool]:
    """The transport, or why not by rank; and whether some rank insists on it."""
    wanted = wanted_by_user()
    made, refusal = (None, f"{VARIABLE}=gloo") if wanted == "gloo" else _make(rank, world_size)
    file, token = (made[0].mapping.file, made[0].token) if made else (0, 0)
    offers = _tell(gather, _Offer(_host(), os.getpid(), file, token, refusal, wanted == "shared"))
    refusals = {peer: offer.refusal for peer, offer in enumerate(offers) if offer.refusal}
    for peer, offer in enumerate(offers):
        if not refusals and offer.host != offers[0].host:
            refusals[peer] = f"it runs on {offer.host}, rank 0 on {offers[0].host}"
    transport: SharedTransport | None = None
    refusal = ""
    if made and not refusals:
        try:
            transport = _open_all(made, offers, rank, world_size, timeout_s)
        except (OSError, WorldError) as error:
            refusal = f"cannot open the others' memory: {error}"
    if not refusals:
        verdicts = _tell(gather, _Offer(refusal=refusal))
        refusals = {peer: offer.refusal for peer, offer in enumerate(verdicts) if offer.refusal}
    if refusals:
        if transport is not None:
            transport.close()
        elif made:
            for mapping in (made[0].mapping, made[1]):
                mapping.close()
        transport = None
    return transport, refusals, any(offer.must_share for offer in offers)


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
    made: tuple[Board, Mapping], offers: list[_Offer], rank: int, world_size: int, timeout_s: float
) -> SharedTransport:
    semaphores = load()
    assert semaphores is not None
    board, first_chunk = made
    links = {}
    for peer, offer in enumerate(offers):
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
    """Name of this host, and of its boot: two hosts can have one name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()[:60]} {file.read().strip()}"
    except OSError:
        return socket.gethostname()[:60]
