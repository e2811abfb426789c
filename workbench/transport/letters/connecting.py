"""How ranks of one host find one another's boards: everybody makes one, tells where it lies, and opens the others'."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from collections.abc import Mapping as MappingOf
from typing import Any, Protocol

import torch

from workbench.errors import WorldError
from workbench.transport.letters.board import Board
from workbench.transport.letters.link import Link
from workbench.transport.letters.mapped import Mapping
from workbench.transport.letters.semaphores import load

Gather = Callable[[torch.Tensor], list[torch.Tensor]]
"""Collects equally shaped CPU tensors of all ranks, by rank."""
MESSAGE_BYTES = 1024


class Place(Protocol):
    """Where a rank's board lies: a file of its process, and the random number on it."""

    @property
    def pid(self) -> int: ...
    @property
    def file(self) -> int: ...
    @property
    def token(self) -> int: ...


def make_board(rank: int, world_size: int, chunk_bytes: int) -> tuple[tuple[Board, Mapping] | None, str]:
    """This rank's board and first chunk, or why it has none."""
    semaphores = load()
    if semaphores is None or not hasattr(os, "pidfd_open"):
        return None, "this system lacks shared semaphores or process files"
    what = f"rank {rank} of {world_size} joins the world"
    board_bytes = Board.size_for(world_size)
    try:
        first_chunk = Mapping.create(chunk_bytes, what)
        board = Board(Mapping.create(board_bytes, what), world_size)
        board.initialise(secrets.randbits(62), semaphores)
    except (OSError, WorldError) as error:
        return None, str(error)
    board.add_chunk(first_chunk)
    return (board, first_chunk), ""


def open_links(board: Board, places: MappingOf[int, Place], rank: int, world_size: int) -> dict[int, Link]:
    """Links to the other ranks of ``places``, whose first chunks are open.

    Raises:
        OSError, WorldError: this process cannot open what another one has made.
    """
    semaphores = load()
    assert semaphores is not None
    links = {}
    for peer, place in places.items():
        if peer == rank:
            continue
        theirs = Board(Mapping.open(place.pid, place.file, Board.size_for(world_size)), world_size)
        if theirs.token != place.token:
            raise WorldError(f"process {place.pid} is not rank {peer} (ranks in different containers?)")
        links[peer] = Link(rank, peer, place.pid, board, theirs, semaphores)
        links[peer].mapping(0)
    return links


def tell(gather: Gather, fields: MappingOf[str, Any]) -> list[dict[str, Any]]:
    """What every rank tells; words are cut where a message has no room for them."""
    text = b""
    for room in (MESSAGE_BYTES, 600, 300, 100, 30):
        text = json.dumps({name: _short(value, room) for name, value in fields.items()}).encode()
        if len(text) <= MESSAGE_BYTES:
            break
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return [json.loads(bytes(part.tolist()).rstrip(b"\0")) for part in gather(message)]


def _short(value: Any, room: int) -> Any:
    if isinstance(value, dict):
        return {key: _short(each, room) for key, each in value.items()}
    return value.encode("ascii", "replace").decode()[:room] if isinstance(value, str) else value
