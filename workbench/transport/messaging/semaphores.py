"""POSIX semaphores in shared memory, through ctypes.

Plain loads and stores of two processes are not ordered on ARM, and Python has no atomic ones. POSIX guarantees that
``sem_post`` and a successful ``sem_wait`` synchronise memory on every machine: the process that acquires a post sees
all writes that precede it. So a semaphore counts the entries, and everything else is ordinary memory.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

SEMAPHORE_BYTES = 64
"""Space for one ``sem_t`` (32 bytes on 64-bit Linux) on a cache line of its own."""

_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Semaphores(NamedTuple):
    """The functions of the C library; each takes a semaphore's address."""

    initialise: Callable[[int], None]
    """Initialise a semaphore that processes share, with count 0."""
    post: Callable[[int], int]
    """Add 1."""
    try_acquire: Callable[[int], int]
    """Subtract 1 if the count is positive: returns 0; else -1."""
    acquire_within: Callable[[int, float], bool]
    """Wait up to this many seconds for a positive count and subtract 1. A signal ends the wait early."""


@cache
def load() -> Semaphores | None:
    """The functions of this machine's C library; None where it has no such semaphores (macOS, Windows)."""
    if sys.platform != "linux":
        return None
    try:
        # PyDLL keeps the GIL: right for calls of less than a microsecond, wrong for a call that waits.
        quick, waiting = ctypes.PyDLL(None), ctypes.CDLL(None)
        post, try_acquire, initialise, clock_wait = (
            quick.sem_post,
            quick.sem_trywait,
            quick.sem_init,
            waiting.sem_clockwait,  # glibc 2.30; sem_timedwait would follow a clock that may be set back
        )
    except (OSError, AttributeError):
        return None
    post.argtypes = try_acquire.argtypes = (ctypes.c_void_p,)
    initialise.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    clock_wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)

    def acquire_within(address: int, seconds: float) -> bool:
        deadline = time.monotonic_ns() + int(seconds * 1e9)
        limit = _Timespec(*divmod(deadline, 1_000_000_000))
        return clock_wait(address, _CLOCK_MONOTONIC, ctypes.byref(limit)) == 0

    return Semaphores(lambda address: _check(initialise(address, 1, 0)), post, try_acquire, acquire_within)


def _check(result: int) -> None:
    if result != 0:
        raise OSError("sem_init: the system has no semaphores that processes can share")
