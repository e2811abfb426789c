"""The protocol of a device for ``ipc``: memory that other processes can open, and events that order its work.

All other modules of ``ipc`` are the same for every device. ``cuda`` implements it for GPUs. The tests have a device
whose memory is host memory and whose work runs late, on a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

HANDLE_BYTES = 64
"""Space for the handle of memory or of an event."""


class DeviceMemory(NamedTuple):
    """A piece of device memory of this process, or one of another process that this process has opened.

    Attributes:
        address: start address in this process.
        data: the bytes, as a tensor on this process's device, which does not keep the memory alive.
    """

    address: int
    data: torch.Tensor


class Event(Protocol):
    """A point in the order of a device's work that other processes can query."""

    def record(self) -> None:
        """Record the event after all work submitted so far, and after the last recorded event of this process."""

    def is_done(self) -> bool:
        """Whether the work before the event has ended, in whichever process it was recorded."""

    def export(self) -> bytes:
        """The handle for ``Device.open_event`` in another process; at most ``HANDLE_BYTES``."""


class Device(Protocol):
    """One device, as one process uses it.

    Work is asynchronous: ``copy`` only submits it. A process that reads another process's memory first waits for the
    event recorded after the last write. A process that frees memory waits in the same way for the last read.

    Attributes:
        torch_device: the device of the tensors.
    """

    torch_device: torch.device

    def allocate(self, num_bytes: int, what: str) -> DeviceMemory:
        """Allocate memory that can be exported as a whole.

        Raises:
            WorldError: the device has too little memory; the text begins with ``what``.
        """

    def export(self, memory: DeviceMemory) -> bytes:
        """The handle for ``open`` in another process; at most ``HANDLE_BYTES``.

        Raises:
            WorldError: this system does not share the device's memory between processes.
        """

    def free(self, memory: DeviceMemory) -> None:
        """Free memory of this process, after all other processes have closed it."""

    def open(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """Open memory of another process.

        Raises:
            WorldError: this process cannot access it.
        """

    def close(self, memory: DeviceMemory) -> None:
        """Close memory of another process, after this process's work on it has ended."""

    def make_event(self) -> Event:
        """Create an event of this process."""

    def open_event(self, handle: bytes) -> Event:
        """Open an event of another process.

        Raises:
            WorldError: this process cannot access it.
        """

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], counts: Sequence[int], reduction: str
    ) -> None:
        """Fill each target from its ``counts`` sources, reduced in order (see ``kernels.blocks``).

        Sources and targets may lie in opened memory, or in pinned memory of the host.
        """

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin memory of the host, so that copies do not block; does nothing where that is not needed."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""

    def synchronize(self) -> None:
        """Return when all work of this process on the device has ended; waits for no other process."""
