"""Copies between pinned memory and a GPU on a stream of their own, through two buffers on the GPU in turn.

The host waits for none of them. The GPU's main stream waits before it reads a buffer, and the copies wait before they
read what the main stream has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Staging:
    """Two buffers on a device, and the stream that fills and empties them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._filled: list[Any] = [None, None]
        self._last: Any = None

    def buffer(self, slot: int, num_bytes: int) -> torch.Tensor:
        """The buffer ``slot``, 0 or 1, of at least so many bytes. Another one than before if that was too small."""
        found = self._buffers[slot]
        if found is None or found.numel() < num_bytes:
            self._module.current_stream().wait_stream(self._stream)  # copies out of the old one
            found = self._buffers[slot] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            if self._device.type == "cuda":
                found.record_stream(self._stream)
            self._stream.wait_stream(self._module.current_stream())  # whatever used this memory before
        return found

    def fill(self, slot: int, sources: Sequence[torch.Tensor]) -> None:
        """Begin to copy the pinned bytes ``sources`` into a buffer, one behind the other."""
        self._copy(slot, sources, to_host=False)
        self._filled[slot] = self._module.Event()
        self._filled[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """Let the main stream wait until a buffer is filled."""
        self._module.current_stream().wait_event(self._filled[slot])

    def empty(self, slot: int, targets: Sequence[torch.Tensor]) -> None:
        """Begin to copy a buffer to pinned bytes, when the main stream has done what it was asked for."""
        self._stream.wait_stream(self._module.current_stream())
        self._copy(slot, targets, to_host=True)
        self._last = self._module.Event()
        self._last.record(self._stream)

    def synchronize(self) -> None:
        """The host waits until it can read what has been copied to it."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def _copy(self, slot: int, pinned: Sequence[torch.Tensor], to_host: bool) -> None:
        buffer, start = self._buffers[slot], 0
        assert buffer is not None or not pinned
        with self._module.stream(self._stream):
            for memory in pinned:
                part = buffer[start : start + memory.numel()]  # type: ignore[index]
                source, target = (part, memory) if to_host else (memory, part)
                target.copy_(source, non_blocking=True)
                start += memory.numel()
