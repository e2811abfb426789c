"""Collectives of small Python values, and error handling on all ranks alike, for saving and loading."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.tensors.world import World


def all_gather_object(value: Any, world: World, what: str) -> list[Any]:
    """The values of all ranks, by rank. All ranks call it; it moves pickled bytes over the world's own transport."""
    if world.world_size == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = world.transport.all_gather(torch.tensor([len(data)], device=world.device), f"{what}: lengths")
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = data
    parts = world.transport.all_gather(padded.to(world.device), what)
    return [
        pickle.loads(part[: int(length)].cpu().numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)
    ]


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
