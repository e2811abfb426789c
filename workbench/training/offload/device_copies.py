"""Storages on their way between a GPU and pinned memory, on a stream of their own.

The host waits for none of them. Forward keeps the last few storages until they are copied; from then on the main stream
waits for each, so that no more are alive. Backward has the next few come while it works on one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

MAX_LEAVING = 4
"""Number of storages that leave at a time."""


class Copied(Protocol):
    """The bytes of a storage: in ``memory``, and ``here`` on the device as long as they are there."""

    memory: torch.Tensor
    here: torch.Tensor | None
    event: Any


class DeviceCopies:
    """The copies of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._leaving: deque[Copied] = deque()

    def copy_out(self, stored: Copied, flat: torch.Tensor) -> None:
        """Begin to copy the bytes of a storage to the host."""
        self._stream.wait_stream(self._module.current_stream())
        self._copy(stored, flat, stored.memory)
        stored.here = flat
        self._leaving.append(stored)
        while len(self._leaving) > MAX_LEAVING:
            self._forget(self._leaving.popleft())

    def bring_back(self, stored: Copied, following: Sequence[Copied]) -> torch.Tensor:
        """The bytes on the device, for the main stream; begins with those that are needed next."""
        for one in (stored, *following):
            self._begin(one)
        if stored in self._leaving:  # they have never left
            self._leaving.remove(stored)
        else:
            self._module.current_stream().wait_event(stored.event)
        assert stored.here is not None
        return stored.here

    def _begin(self, stored: Copied) -> None:
        if stored.here is None:
            stored.here = torch.empty(stored.memory.numel(), dtype=torch.uint8, device=self._device)
            if self._device.type == "cuda":
                stored.here.record_stream(self._stream)
            self._stream.wait_stream(self._module.current_stream())  # which has used this memory before
            self._copy(stored, stored.memory, stored.here)

    def _copy(self, stored: Copied, source: torch.Tensor, target: torch.Tensor) -> None:
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        stored.event = self._module.Event()
        stored.event.record(self._stream)

    def _forget(self, stored: Copied) -> None:
        """Free the memory on the device when it is copied: whatever gets it comes behind the copy."""
        self._module.current_stream().wait_event(stored.event)
        stored.here = None
