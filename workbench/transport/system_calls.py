"""Two calls of Linux that ``os`` lacks where Python was built for older systems: conda's, and uv's until 2026."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any

_MFD_CLOEXEC = 1
_PIDFD_OPEN = 434
"""Its number on every architecture; glibc has no function for it before 2.36."""


def memory_file() -> int:
    """A new file in memory, without a name.

    Raises:
        OSError: the system refuses it.
    """
    return _checked(_libc().memfd_create(b"workbench", _MFD_CLOEXEC), "memfd_create")


def process_file(pid: int) -> int:
    """A file of a process of this host, which is readable once the process has ended.

    Raises:
        OSError: there is no such process, or the system has no such files.
    """
    return _checked(_libc().syscall(_PIDFD_OPEN, pid, 0), "pidfd_open")


@cache
def has_process_files() -> bool:
    """Whether `process_file` works here. It does not before Linux 5.3, and where a sandbox forbids it."""
    if sys.platform != "linux":
        return False
    try:
        os.close(process_file(os.getpid()))
    except OSError:
        return False
    return True


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.memfd_create.argtypes = (ctypes.c_char_p, ctypes.c_uint)
    libc.syscall.argtypes = (ctypes.c_long,) * 3
    return libc


def _checked(file: int, call: str) -> int:
    if file < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return file
