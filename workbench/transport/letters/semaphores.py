"""POSIX semaphores inside mapped memory, through ctypes.

Between processes, plain loads and stores order nothing on ARM, and Python has no atomic ones. POSIX promises that
``sem_post`` and a successful ``sem_wait`` synchronise memory on every machine: whatever a process has written before a
post is seen by the process that takes this post. So a semaphore says *that* something is there, and everything else in
the segment is ordinary memory.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

SEMAPHORE_BYTES = 64
"""Room for one ``sem_t`` (32 bytes on 64-bit Linux) on a cache line of its own."""

_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Semaphores(NamedTuple):
    """The calls; each takes a semaphore's address."""

    initialise: Callable[[int], None]
    """Make a semaphore with count 0 that processes share."""
    post: Callable[[int], int]
    """Add one."""
    try_take: Callable[[int], int]
    """Take one; 0 if there was one, else -1."""
    take_within: Callable[[int, float], bool]
    """Wait up to so many seconds for one and take it. A signal ends the wait early."""


@cache
def load() -> Semaphores | None:
    """The calls of this machine's C library; None where there are no such semaphores (macOS, Windows)."""
    if sys.platform != "linux":
        return None
    try:
        # PyDLL keeps the interpreter's lock: right for calls of less than a microsecond, wrong for one that waits.
        quick, waiting = ctypes.PyDLL(None), ctypes.CDLL(None)
        post, try_take, initialise, clock_wait = (
            quick.sem_post,
            quick.sem_trywait,
            quick.sem_init,
            waiting.sem_clockwait,  # glibc 2.30; sem_timedwait would follow a clock that may be set back
        )
    except (OSError, AttributeError):
        return None
    post.argtypes = try_take.argtypes = (ctypes.c_void_p,)
    initialise.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    clock_wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)

    def take_within(address: int, seconds: float) -> bool:
        deadline = time.monotonic_ns() + int(seconds * 1e9)
        limit = _Timespec(*divmod(deadline, 1_000_000_000))
        return clock_wait(address, _CLOCK_MONOTONIC, ctypes.byref(limit)) == 0

    return Semaphores(lambda address: _check(initialise(address, 1, 0)), post, try_take, take_within)


def _check(result: int) -> None:
    if result != 0:
        raise OSError("sem_init: the system has no semaphores that processes can share")
