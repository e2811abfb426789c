"""Links between ranks of one host: each rank makes a control page, sends its address, and opens its peers' pages."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from workbench.errors import WorldError
from workbench.transport.messaging.control_page import ControlPage
from workbench.transport.messaging.link import Link
from workbench.transport.messaging.semaphores import load
from workbench.transport.messaging.shared_memory import SharedMemory
from workbench.transport.system_calls import has_process_files

GatherBytes = Callable[[torch.Tensor], list[torch.Tensor]]
"""All-gathers equally shaped CPU tensors, by rank."""
_JSON_BYTES = 1024


class PageAddress(NamedTuple):
    """Address of a rank's control page: a file of its process, and the token on the page."""

    pid: int
    file: int
    token: int


def make_control_page(
    rank: int, world_size: int, chunk_bytes: int
) -> tuple[tuple[ControlPage, SharedMemory] | None, str]:
    """This rank's control page and first chunk, or None and the reason."""
    semaphores = load()
    if semaphores is None or not has_process_files():
        return None, "this system lacks shared semaphores (glibc 2.30) or process files (Linux 5.3)"
    what = f"rank {rank} of {world_size} joins the world"
    page_bytes = ControlPage.size_for(world_size)
    try:
        first_chunk = SharedMemory.create(chunk_bytes, what)
        page = ControlPage(SharedMemory.create(page_bytes, what), world_size)
        page.initialise(secrets.randbits(62), semaphores)
    except (OSError, WorldError) as error:
        return None, str(error)
    page.add_chunk(first_chunk)
    return (page, first_chunk), ""


def open_links(page: ControlPage, addresses: Mapping[int, PageAddress], rank: int, world_size: int) -> dict[int, Link]:
    """Links to the other ranks of ``addresses``, with their first chunks opened.

    Raises:
        OSError, WorldError: this process cannot open a page or a chunk of another process.
    """
    semaphores = load()
    assert semaphores is not None
    links = {}
    for peer, address in addresses.items():
        if peer == rank:
            continue
        theirs = ControlPage(SharedMemory.open(address.pid, address.file, ControlPage.size_for(world_size)), world_size)
        if theirs.token != address.token:
            raise WorldError(f"process {address.pid} is not rank {peer} (ranks in different containers?)")
        links[peer] = Link(rank, peer, address.pid, page, theirs, semaphores)
        links[peer].memory(0)
    return links


def all_gather_json(gather: GatherBytes, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All-gather a dict of each rank as JSON; long texts are cut to fit the message."""
    text = b""
    for room in (_JSON_BYTES, 600, 300, 100, 30):
        text = json.dumps({name: _short(value, room) for name, value in fields.items()}).encode()
        if len(text) <= _JSON_BYTES:
            break
    message = torch.zeros(_JSON_BYTES, dtype=torch.uint8)
    message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return [json.loads(bytes(part.tolist()).rstrip(b"\0")) for part in gather(message)]


def _short(value: Any, room: int) -> Any:
    if isinstance(value, dict):
        return {key: _short(each, room) for key, each in value.items()}
    return value.encode("ascii", "replace").decode()[:room] if isinstance(value, str) else value
