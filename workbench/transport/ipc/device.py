"""Memory on a device that processes of one host can open, and marks in the order of its work: what ``ipc`` asks for.

Everything above this is the same for every device. ``cuda`` is the one for GPUs; the tests have one whose memory is
that of the host and whose work runs late, on a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

HANDLE_BYTES = 64
"""Room for what names memory, or an event, to another process."""


class Memory(NamedTuple):
    """A piece of device memory, this process's own or another's that it has opened.

    Attributes:
        address: where it starts, as this process sees it.
        data: its bytes, as a tensor on this process's device. It does not keep the memory.
    """

    address: int
    data: torch.Tensor


class Event(Protocol):
    """A place in the order of a device's work that another process can look at."""

    def record(self) -> None:
        """Move the place to here: after all that was given to the device, and after the last place of any event."""

    def is_done(self) -> bool:
        """Whether the work before the place has ended, wherever it was recorded."""

    def export(self) -> bytes:
        """What ``Device.open_event`` of another process takes; at most ``HANDLE_BYTES``."""


class Device(Protocol):
    """One device as one process uses it.

    Work is asynchronous: ``copy`` only gives it to the device. Whoever reads another process's memory first waits until
    the event that the other has recorded after its last write is done, and whoever gives memory back knows in the same
    way that nobody reads it any more.

    Attributes:
        torch_device: where the tensors live.
    """

    torch_device: torch.device

    def allocate(self, num_bytes: int, what: str) -> Memory:
        """New memory that can be exported as a whole.

        Raises:
            WorldError: there is not that much; the message begins with ``what``.
        """

    def export(self, memory: Memory) -> bytes:
        """What ``open`` of another process takes; at most ``HANDLE_BYTES``.

        Raises:
            WorldError: this system does not share the device's memory between processes.
        """

    def free(self, memory: Memory) -> None:
        """Give back memory that this process has allocated, after all others have closed it."""

    def open(self, handle: bytes, num_bytes: int) -> Memory:
        """Another process's memory.

        Raises:
            WorldError: this process cannot reach it.
        """

    def close(self, memory: Memory) -> None:
        """Let go of another process's memory; this process's own work on it has ended."""

    def make_event(self) -> Event:
        """An event of this process."""

    def open_event(self, handle: bytes) -> Event:
        """Another process's event.

        Raises:
            WorldError: this process cannot reach it.
        """

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], counts: Sequence[int], reduction: str
    ) -> None:
        """Fill each target from its ``counts`` sources, which are combined in order (see ``kernels.blocks``).

        Source and target may lie in opened memory, or in memory of the host that ``pin`` was called for.
        """

    def pin(self, address: int, num_bytes: int) -> None:
        """Prepare memory of the host for copies that do not block; does nothing where that is not needed."""

    def unpin(self, address: int) -> None:
        """Take ``pin`` back."""

    def synchronize(self) -> None:
        """Return when all work of this process on the device has ended; it waits for no other process."""
