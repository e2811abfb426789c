"""Collectives of small Python values, and error handling on all ranks alike, for saving and loading."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.tensors.copy_to_device import copy_to_device
from workbench.tensors.world import World

_FIRST_BYTES = 512
"""Bytes that are gathered at once. Longer values take a second exchange, of the size that the first one tells."""
_LENGTH_BYTES = 8


def all_gather_object(value: Any, world: World, what: str) -> list[Any]:
    """The values of all ranks, by rank. All ranks call it; it moves pickled bytes over the world's own transport.

    In a dry run, whose other ranks do not run, they have the value of this one.
    """
    if world.world_size == 1 or world.device.type == "meta":
        return [value] * world.world_size
    pickled = pickle.dumps(value)
    data = len(pickled).to_bytes(_LENGTH_BYTES, "little") + pickled
    parts = _gather_bytes(data[:_FIRST_BYTES], _FIRST_BYTES, world, what)
    ends = [_LENGTH_BYTES + int.from_bytes(part[:_LENGTH_BYTES], "little") for part in parts]
    if max(ends) > _FIRST_BYTES:
        parts = _gather_bytes(data, max(ends), world, f"{what}: all of it")
    return [pickle.loads(part[_LENGTH_BYTES:end]) for part, end in zip(parts, ends, strict=True)]


def _gather_bytes(data: bytes, size: int, world: World, what: str) -> list[bytes]:
    """The bytes of all ranks, by rank, each filled up to ``size``."""
    padded = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    parts = world.transport.all_gather(copy_to_device(padded, world.device), what)
    return [part.numpy().tobytes() for part in torch.stack(parts).cpu()]


def run_on_all_ranks(act: Callable[[], Any], world: World, what: str) -> Any:
    """Run ``act`` on every rank; if it fails on one, all of them raise, so that none waits for another.

    Returns:
        the result of ``act`` on this rank.
    """
    result, error = None, None
    try:
        result = act()
    except Exception as found:  # noqa: BLE001 - raised again below, on every rank
        error = found
    raise_on_all_ranks(error, world, what)
    return result


def raise_on_all_ranks(error: BaseException | None, world: World, what: str) -> None:
    """Raise ``error`` on its rank, and on the others a ``CheckpointError`` that names it. All ranks call it."""
    texts = all_gather_object(None if error is None else f"{type(error).__name__}: {error}", world, what)
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if failed:
        first = min(failed)
        raise CheckpointError(f"{what} failed on ranks {sorted(failed)}. Rank {first}: {failed[first]}")
