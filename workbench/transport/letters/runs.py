"""Copies of slices run by run: what lies one behind the other in both places moves by one call of ``memmove``.

torch copies such slices in vectors, numpy by the C library, which takes 20% less time for runs of a few kilobytes
(``docs/design/decisions/``). Short runs are left to torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from workbench.core.layout import Shape
from workbench.transport.letters.mapped import contiguous_strides

SHORTEST_RUN_BYTES = 256


@dataclass(frozen=True, eq=False, slots=True)
class Runs:
    """How a slice lies in two places.

    Attributes:
        shape: how many runs there are, by dim; of a slice that is one run, how many bytes.
        kind: what numpy calls a run of so many bytes.
        source_strides, goal_strides: bytes from run to run.
        source_memory, goal_memory: what ctypes calls the bytes from the first to the last one of the slice.
    """

    shape: Shape
    kind: np.dtype[Any]
    source_strides: Shape
    goal_strides: Shape
    source_memory: Any
    goal_memory: Any


@lru_cache(maxsize=4096)
def runs_of(shape: Shape, source_strides: Shape, goal_strides: Shape, itemsize: int) -> Runs | None:
    """The longest runs of a slice with these strides, in elements; None where they are too short to be worth it.

    >>> runs_of((6, 2, 50), (200, 50, 1), (100, 50, 1), 4).kind.itemsize
    400
    """
    run_bytes, num_dims = itemsize, len(shape)
    while num_dims and (
        shape[num_dims - 1] == 1
        or source_strides[num_dims - 1] * itemsize == run_bytes == goal_strides[num_dims - 1] * itemsize
    ):
        num_dims -= 1
        run_bytes *= shape[num_dims]
    if run_bytes < SHORTEST_RUN_BYTES and num_dims:
        return None
    if not num_dims:
        memory = ctypes.c_char * run_bytes
        return Runs((run_bytes,), np.dtype(np.uint8), (1,), (1,), memory, memory)
    outer = shape[:num_dims]
    strides = [tuple(step * itemsize for step in known[:num_dims]) for known in (source_strides, goal_strides)]
    lengths = [sum((n - 1) * step for n, step in zip(outer, known, strict=True)) + run_bytes for known in strides]
    return Runs(outer, np.dtype((np.void, run_bytes)), *strides, *(ctypes.c_char * length for length in lengths))


def packing_runs(tensor: torch.Tensor) -> Runs | None:
    """The runs of a tensor whose elements are to lie one behind the other; None where torch is to copy it."""
    if tensor.is_conj() or tensor.is_neg():
        return None
    shape = tuple(tensor.shape)
    return runs_of(shape, tensor.stride(), contiguous_strides(shape), tensor.element_size())


def copy_runs(runs: Runs, source: int, goal: int) -> None:
    """Copy a slice from one address to another; the two places do not overlap."""
    taken, given = views_of(runs, source, goal)
    given[...] = taken


@lru_cache(maxsize=1024)
def views_of(runs: Runs, source: int, goal: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The runs of a slice at two addresses. They do not keep the memory: use them while somebody else does.

    Kept, because boxings that come again find their shards in the same places, and a large copy leaves the caches full
    of data: whatever Python does behind it takes several times as long.
    """
    taken = np.ndarray(runs.shape, runs.kind, runs.source_memory.from_address(source), 0, runs.source_strides)
    given = np.ndarray(runs.shape, runs.kind, runs.goal_memory.from_address(goal), 0, runs.goal_strides)
    return taken, given
