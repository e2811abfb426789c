"""Strided copies run by run: each run of elements that is contiguous on both sides is copied by one ``memmove``.

torch copies such slices with vector instructions, numpy with the C library, which takes 20% less time for runs of a few
kilobytes (``docs/design/decisions/``). Slices with short runs are left to torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from workbench.core.layout import Shape
from workbench.transport.messaging.shared_memory import contiguous_strides

MIN_RUN_BYTES = 256


@dataclass(frozen=True, eq=False, slots=True)
class StridedCopy:
    """The runs of a slice in its source and in its destination.

    Attributes:
        shape: number of runs, by dim; for a slice of one run, its number of bytes.
        run_dtype: the numpy dtype of one run.
        source_strides, destination_strides: strides of the runs, in bytes.
        source_memory, destination_memory: ctypes array types that span the slice on each side.
    """

    shape: Shape
    run_dtype: np.dtype[Any]
    source_strides: Shape
    destination_strides: Shape
    source_memory: Any
    destination_memory: Any


@lru_cache(maxsize=4096)
def strided_copy(shape: Shape, source_strides: Shape, destination_strides: Shape, itemsize: int) -> StridedCopy | None:
    """The copy of a slice with these strides (in elements) by its longest runs; None where the runs are too short.

    >>> strided_copy((6, 2, 50), (200, 50, 1), (100, 50, 1), 4).run_dtype.itemsize
    400
    """
    run_bytes, num_dims = itemsize, len(shape)
    while num_dims and (
        shape[num_dims - 1] == 1
        or source_strides[num_dims - 1] * itemsize == run_bytes == destination_strides[num_dims - 1] * itemsize
    ):
        num_dims -= 1
        run_bytes *= shape[num_dims]
    if run_bytes < MIN_RUN_BYTES and num_dims:
        return None
    if not num_dims:
        memory = ctypes.c_char * run_bytes
        return StridedCopy((run_bytes,), np.dtype(np.uint8), (1,), (1,), memory, memory)
    outer = shape[:num_dims]
    strides = [tuple(step * itemsize for step in known[:num_dims]) for known in (source_strides, destination_strides)]
    lengths = [sum((n - 1) * step for n, step in zip(outer, known, strict=True)) + run_bytes for known in strides]
    return StridedCopy(outer, np.dtype((np.void, run_bytes)), *strides, *(ctypes.c_char * length for length in lengths))


def packing_copy(tensor: torch.Tensor) -> StridedCopy | None:
    """The copy of a tensor into contiguous memory; None where torch should copy it."""
    if tensor.is_conj() or tensor.is_neg():
        return None
    shape = tuple(tensor.shape)
    return strided_copy(shape, tensor.stride(), contiguous_strides(shape), tensor.element_size())


def copy_strided(copy: StridedCopy, source: int, destination: int) -> None:
    """Copy a slice from one address to another; the two must not overlap."""
    taken, given = copy_views(copy, source, destination)
    given[...] = taken


@lru_cache(maxsize=1024)
def copy_views(copy: StridedCopy, source: int, destination: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The runs of a slice at two addresses. The views do not keep the memory alive.

    Cached, because a repeated boxing finds its shards at the same addresses, and a large copy leaves the processor's
    caches full of data, so that the Python code after it runs several times slower.
    """
    taken = np.ndarray(copy.shape, copy.run_dtype, copy.source_memory.from_address(source), 0, copy.source_strides)
    given = np.ndarray(
        copy.shape, copy.run_dtype, copy.destination_memory.from_address(destination), 0, copy.destination_strides
    )
    return taken, given
