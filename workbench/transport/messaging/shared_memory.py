"""Memory that processes of one host share: anonymous files, which peers open through /proc.

A memfd has no name, so no file stays in /dev/shm after a crash, and the size of /dev/shm does not matter. Its pages are
reserved when it is created: too little memory is an error at that time, not a SIGBUS later.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import psutil
import torch

from workbench.errors import WorldError
from workbench.transport.messaging.huge_pages import map_aligned, reserve_huge_pages
from workbench.transport.system_calls import memory_file
from workbench.units import format_bytes

_SHARE_OF_AVAILABLE = 0.9


class SharedMemory:
    """One shared file, mapped into this process.

    Attributes:
        file: the owner's file descriptor, which stays open for the peers; -1 after ``close``.
        size: size in bytes.
        address: start address in this process.
        data: the bytes, writable.
        is_released: whether the pages are returned to the system; see ``reserve_pages``.
    """

    def __init__(self, file: int, size: int) -> None:
        self.file, self.size, self.is_released = file, size, False
        self._map, self._start = map_aligned(file, size)
        self.data = memoryview(self._map)[self._start : self._start + size]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        self._bytes = torch.frombuffer(self.data, dtype=torch.uint8)
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    @classmethod
    def create(cls, size: int, what: str) -> SharedMemory:
        """A new file of ``size`` bytes.

        Raises:
            WorldError: the system has too little memory, or this process too many open files; the text begins with
                ``what``.
        """
        try:
            file = memory_file()
            try:
                os.fchmod(file, 0o600)
                _check_room(size, what)
                os.ftruncate(file, size)
                memory = cls(file, size)
                memory._allocate_pages()
            except BaseException:
                os.close(file)
                raise
            return memory
        except OSError as error:
            limit = " (`ulimit -n` sets how many)" if error.errno == errno.EMFILE else ""
            raise _too_little(what, size, f"the system reports: {error.strerror}{limit}") from error

    @classmethod
    def open(cls, pid: int, file: int, size: int) -> SharedMemory:
        """The file ``file`` of process ``pid``; the mapping outlives that process."""
        own = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(own, size)
        finally:
            os.close(own)

    def release_pages(self) -> None:
        """Return the pages to the system, for all processes that map them; their contents are lost."""
        self._map.madvise(mmap.MADV_REMOVE, self._start, self.size)
        self.is_released = True

    def reserve_pages(self, what: str) -> None:
        """Allocate the pages again after ``release_pages``, filled with zeros.

        Raises:
            WorldError: as in ``create``.
        """
        _check_room(self.size, what)
        try:
            self._allocate_pages()
        except OSError as error:
            raise _too_little(what, self.size, f"the system reports: {error.strerror}") from error
        self.is_released = False

    def _allocate_pages(self) -> None:
        reserve_huge_pages(self.file, self.address, self.size)
        os.posix_fallocate(self.file, 0, self.size)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at ``offset`` bytes, which must be a multiple of the element size."""
        return self.strided(offset, shape, contiguous_strides(shape), dtype)

    def strided(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A strided tensor at ``offset`` bytes; strides in elements."""
        whole = self._typed.get(dtype)
        if whole is None:
            whole = self._typed[dtype] = self._bytes.view(dtype)
        return whole.as_strided(shape, strides, offset // dtype.itemsize)

    def close(self) -> None:
        """Close the owner's file. The memory is freed when no process maps it and no tensor views it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _check_room(size: int, what: str) -> None:
    room = int(available_bytes() * _SHARE_OF_AVAILABLE)
    if size > room:
        raise _too_little(what, size, f"{format_bytes(room)} are available")


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements, as torch has them.

    >>> contiguous_strides((4, 0, 3))
    (3, 3, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def available_bytes() -> int:
    """Memory that this process can still allocate: the machine's, or the rest of its control group's limit."""
    return min([psutil.virtual_memory().available, *_room_in_control_groups()])


def _room_in_control_groups(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Memory left under the limits of this process's control group (version 2) and of its ancestors."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    path = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), None)
    if path is None:
        return
    for folder in (root / path, *(root / path).parents):
        if folder == root.parent:
            return
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            reclaimable = _statistic(folder / "memory.stat", "inactive_file")
        except (OSError, ValueError):
            continue
        if limit != "max":
            yield max(0, int(limit) - used + reclaimable)


def _statistic(file: Path, name: str) -> int:
    pairs = (line.split() for line in file.read_text().splitlines())
    return next((int(value) for key, value in pairs if key == name), 0)


def _too_little(what: str, size: int, have: str) -> WorldError:
    return WorldError(
        f"{what}: {format_bytes(size)} of shared memory are wanted, {have}. Shared memory is reserved before it is "
        "used. Free memory, use fewer ranks or smaller batches, or set WORKBENCH_TRANSPORT=gloo."
    )
