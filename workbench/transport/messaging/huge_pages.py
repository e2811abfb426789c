"""Huge pages for shared memory, where the kernel provides them.

A strided copy moves to another page every row or two. With pages of 2 MiB all addresses fit into the processor's TLB,
and a peer that reads a tensor for the first time has one page fault per 2 MiB instead of 512. Most machines give shared
files no huge pages by default (``shmem_enabled`` is ``never``), but a process may request them for a file that is
mapped at a multiple of their size (``MADV_COLLAPSE``, Linux 6.1). Without huge pages, nothing else changes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from functools import cache
from typing import Any

HUGE_PAGE_BYTES = 2 * 2**20
_STEP_BYTES = 16 * HUGE_PAGE_BYTES
_MOST_CPU_S_PER_STEP = 0.05
"""The kernel compacts fragmented memory first; this limits the processor time of that."""
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def map_aligned(file: int, size: int) -> tuple[mmap.mmap, int]:
    """A mapped range of addresses and the offset at which ``file`` begins in it, aligned to a huge page.

    Python cannot choose an address, so this maps a larger range and replaces a part of it by the file. Both are
    unmapped together.

    Raises:
        OSError: the system cannot map the file.
    """
    if size < HUGE_PAGE_BYTES:
        return mmap.mmap(file, size), 0
    taken = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(taken))
    start = -address % HUGE_PAGE_BYTES
    readable = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mmap(address + start, size, readable, mmap.MAP_SHARED | _MAP_FIXED, file, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return taken, start


def reserve_huge_pages(file: int, address: int, size: int) -> None:
    """Allocate the memory of an empty file, mapped at ``address``, in huge pages as far as the kernel has any.

    Raises:
        OSError: the system has no memory left.
    """
    for start in range(0, size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, _STEP_BYTES):
        stop = min(start + _STEP_BYTES, size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        for page in range(start, stop, HUGE_PAGE_BYTES):
            os.pwrite(
                file, b"\0", page
            )  # the kernel collapses only ranges with at least one page, and copies full ones
        began = time.thread_time()
        failed = _libc().madvise(address + start, stop - start, _MADV_COLLAPSE) != 0
        if failed or time.thread_time() - began > _MOST_CPU_S_PER_STEP:
            return
