"""Large pages under mapped memory, where the kernel gives them.

A strided copy goes to another page every row or two. With pages of 2 MiB the processor has all their addresses at hand,
and a peer that reads a tensor for the first time has one page fault per 2 MiB instead of 512. On most machines shared
files get no such pages by themselves (``shmem_enabled`` is ``never``), but a process may ask for them where a file is
mapped at a multiple of their size (``MADV_COLLAPSE``, Linux 6.1). Where there are none, nothing else changes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from functools import cache
from typing import Any

LARGE_PAGE_BYTES = 2 * 2**20
_STEP_BYTES = 16 * LARGE_PAGE_BYTES
_MOST_CPU_S_PER_STEP = 0.05
"""Where memory is in small pieces, the kernel moves them together first; this is how long that may take."""
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
    """A range of addresses, and how far into it ``file`` begins: at a multiple of a large page.

    Python chooses no addresses, so it takes a larger range, and the file replaces a part of it; both go together.

    Raises:
        OSError: the system cannot map the file.
    """
    if size < LARGE_PAGE_BYTES:
        return mmap.mmap(file, size), 0
    taken = mmap.mmap(-1, size + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(taken))
    start = -address % LARGE_PAGE_BYTES
    readable = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mmap(address + start, size, readable, mmap.MAP_SHARED | _MAP_FIXED, file, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return taken, start


def have_large_pages(file: int, address: int, size: int) -> None:
    """Give an empty file that is mapped at ``address`` its memory in large pages, as far as there are any.

    Raises:
        OSError: there is no memory at all.
    """
    for start in range(0, size // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES, _STEP_BYTES):
        stop = min(start + _STEP_BYTES, size // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES)
        for page in range(start, stop, LARGE_PAGE_BYTES):
            os.pwrite(file, b"\0", page)  # the kernel enlarges what has something, and copies what is full
        began = time.thread_time()
        failed = _libc().madvise(address + start, stop - start, _MADV_COLLAPSE) != 0
        if failed or time.thread_time() - began > _MOST_CPU_S_PER_STEP:
            return
