"""Memory beside that of a rank's device: pinned memory of the host for a GPU, files mapped to memory for a CPU.

The file of a CPU rank never has a name (or loses it at once), so it ends with the process, also where that is killed.
Pages that the process gives back stay in the kernel's cache as long as memory is free, and are on the disk otherwise.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import sys
import tempfile
import weakref
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from workbench.errors import StrategyError
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World
from workbench.units import format_bytes

_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files take memory."""
_FOLDERS_ON_DISK = ("/var/tmp",)
"""Where files go if the usual temporary folder is in memory."""
_PINNED_UNIT = 256
_addresses: set[int] = set()
_said: set[str] = set()


class PinnedMemory:
    """Memory of the host from and to which a GPU copies by itself.

    Blocks grow, because torch rounds each up to a power of two. What is freed is used for the same size again: copies
    of one stream come in order.
    """

    def __init__(self) -> None:
        self._block, self._used, self._total = torch.empty(0, dtype=torch.uint8), 0, 0
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """New bytes, as a tensor of the CPU."""
        size = rounded(num_bytes, _PINNED_UNIT)
        if self._free[size]:
            return self._free[size].pop()[:num_bytes]
        if self._used + size > self._block.numel():
            length = 1 << (max(size, self._total) - 1).bit_length()
            self._block, self._used = torch.empty(length, dtype=torch.uint8).pin_memory(), 0
            self._total += length
            _register(self._block)
        start, self._used = self._used, self._used + size
        return self._block[start : start + num_bytes]

    def free(self, memory: torch.Tensor) -> None:
        """Use these bytes again: nobody will ask for them any more. Tensors that show them may still live."""
        size = rounded(memory.numel(), _PINNED_UNIT)
        self._free[size].append(memory.as_strided((size,), (1,)))

    def will_read(self, memory: torch.Tensor) -> None:
        """Nothing: the memory is there."""

    def release(self, memory: torch.Tensor) -> None:
        """Nothing: pinned memory stays."""


class MappedFile:
    """Memory in a file of a temporary folder, which is gone when nobody uses it any more.

    The file is mapped in blocks that grow, because each keeps a file descriptor. Space on the disk is taken as needed.
    Each allocation has a storage of its own; with the last tensor that shows it, its place is free for the same size.
    """

    def __init__(self) -> None:
        self.folder = disk_folder()
        with tempfile.TemporaryFile(prefix="workbench-offload-", dir=self.folder) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._mapping: mmap.mmap | None = None
        self._start = self._used = self._size = 0
        self._places: dict[int, _Place] = {}
        self._free: dict[int, list[_Place]] = defaultdict(list)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """New bytes, as a tensor of the CPU.

        Raises:
            StrategyError: the disk is full.
        """
        size = rounded(num_bytes, mmap.ALLOCATIONGRANULARITY)
        place = self._free[size].pop() if self._free[size] else self._new_place(size)
        memory = torch.frombuffer(place.mapping, dtype=torch.uint8, count=num_bytes, offset=place.start)
        storage = memory.untyped_storage()
        self._places[storage.data_ptr()] = place
        _register(memory)
        weakref.finalize(storage, self._give_back, storage.data_ptr(), size).atexit = False
        return memory

    def free(self, memory: torch.Tensor) -> None:
        """Nothing: the place is free with the last tensor that shows it."""

    def will_read(self, memory: torch.Tensor) -> None:
        """Let the kernel read ahead, without waiting."""
        self._places[memory.data_ptr()].advise(mmap.MADV_WILLNEED, memory.numel())

    def release(self, memory: torch.Tensor) -> None:
        """Give back the pages, which the process does not need for now; what is written to them stays in the file."""
        self._places[memory.data_ptr()].advise(mmap.MADV_DONTNEED, memory.numel())

    def _new_place(self, size: int) -> _Place:
        if self._mapping is None or self._used + size > len(self._mapping):
            self._start, self._used, length = self._size, 0, max(size, self._size)
            self._size += length
            os.ftruncate(self._file, self._size)
            self._mapping = mmap.mmap(self._file, length, offset=self._start)
        try:
            if hasattr(os, "posix_fallocate"):  # else a write to the mapped memory ends the process
                os.posix_fallocate(self._file, self._start + self._used, size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise _no_space(size, self.folder) from None
        self._used += size
        return _Place(self._mapping, self._used - size)

    def _give_back(self, address: int, size: int) -> None:
        place = self._places.pop(address)
        place.advise(mmap.MADV_DONTNEED, size)
        self._free[size].append(place)


class _Place(NamedTuple):
    """A part of a mapped file."""

    mapping: mmap.mmap
    start: int

    def advise(self, advice: int, num_bytes: int) -> None:
        """Tell the kernel how these bytes will be used."""
        self.mapping.madvise(advice, self.start, num_bytes)


HostMemory = PinnedMemory | MappedFile
"""Where offloaded tensors lie."""


def host_memory(device: torch.device) -> HostMemory:
    """New memory beside that of a device."""
    return MappedFile() if device.type == "cpu" else PinnedMemory()


def is_offloaded(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory of this module."""
    with local_torch():
        return tensor.untyped_storage().data_ptr() in _addresses


def disk_folder() -> str:
    """The temporary folder, or one on a disk where that is in memory.

    Raises:
        StrategyError: both are in memory.
    """
    folders = [tempfile.gettempdir(), *filter(os.path.isdir, _FOLDERS_ON_DISK)]
    for folder in folders:
        if _file_system(folder) not in _IN_MEMORY:
            return folder
    raise StrategyError(
        f"offload: the file systems of {len(folders)} temporary folders ({', '.join(folders)}) are in memory. On CPUs, "
        "what is offloaded lies in files on a disk. Set TMPDIR to a folder on a disk."
    )


def check_space(num_bytes: int, world: World, option: str) -> None:
    """On CPUs, compare what the ranks of each host will write with the free space of its disk. All ranks call it.

    Rank 0 says once where the files lie.

    Raises:
        StrategyError: on all ranks, if there is too little space on one of the hosts, or no folder on a disk.
    """
    if world.device.type != "cpu":
        return
    folder, lacking = "", ""
    try:
        folder = disk_folder()
    except StrategyError as error:
        lacking = str(error)
    mine = (socket.gethostname(), num_bytes, psutil.disk_usage(folder).free if folder else 0, folder, lacking)
    every = all_gather_object(mine, world, f"space for {option}")
    if why := lacking or next((f"on {host}, {text}" for host, *_, text in every if text), ""):
        raise StrategyError(why)
    for host in dict.fromkeys(host for host, *_ in every):
        _, sizes, free, folders, _ = zip(*(one for one in every if one[0] == host), strict=True)
        if sum(sizes) > min(free):
            raise _no_space(sum(sizes), folders[0], min(free), option)
    if world.rank == 0 and folder not in _said:
        _said.add(folder)
        space = format_bytes(mine[2])
        sys.stdout.write(f"{option}: on CPUs in files in {folder} ({space} free), which end with the processes.\n")


def _no_space(num_bytes: int, folder: str, free: int | None = None, option: str = "offload") -> StrategyError:
    free = psutil.disk_usage(folder).free if free is None else free
    return StrategyError(
        f"{option}: {format_bytes(num_bytes)} for files in {folder}, where {format_bytes(free)} are free. On CPUs, "
        "what is offloaded lies in files on a disk. Set TMPDIR to a folder with more space, or leave offload out."
    )


def _file_system(folder: str) -> str:
    path = Path(folder).resolve()
    inside = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(inside, key=lambda part: len(part.mountpoint)).fstype if inside else ""


def _register(memory: torch.Tensor) -> None:
    storage = memory.untyped_storage()
    _addresses.add(storage.data_ptr())
    weakref.finalize(storage, _addresses.discard, storage.data_ptr()).atexit = False


def rounded(number: int, unit: int) -> int:
    """The number, up to the next multiple of ``unit``."""
    return -(-number // unit) * unit
