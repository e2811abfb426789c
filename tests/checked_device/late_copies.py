"""Copies between the device and pinned memory of the host, which a GPU makes later than the host asks for them.

A copy to the host holds garbage until the thread waits for the device, or an operator uses the device's memory. A copy
from the host is at once right for operators, whose own work is as late; that the host has not written to its memory
before it waits for the device is checked in the wait.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch

_of_thread = threading.local()
_pinned: set[int] = set()


class _Copies:
    """Copies of a thread since its last wait."""

    def __init__(self) -> None:
        self.to_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.from_host: list[tuple[torch.Tensor, torch.Tensor]] = []


def pin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A copy in pinned memory."""
    pinned = tensor.clone()
    place = pinned.untyped_storage().data_ptr()
    _pinned.add(place)
    weakref.finalize(pinned, _pinned.discard, place)
    return pinned


def is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """Whether a tensor lies in pinned memory."""
    return tensor.untyped_storage().data_ptr() in _pinned


def copy_to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy memory of the device to pinned memory, later."""
    _bytes(target).fill_(0xFF)
    _copies().to_host.append((source, target))


def copy_from_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy pinned memory, which the host may not write before it has waited."""
    target.copy_(source)
    # Its memory, not the tensor, which on a GPU may end before the copy: a captured step must not leave one.
    _copies().from_host.append((source.view(source.shape), source.clone()))


def use(tensors: Iterable[torch.Tensor]) -> None:
    """An operator uses these tensors: their earlier copies to the host are made."""
    _make(0, tensors)


def reach(tensors: Iterable[torch.Tensor]) -> None:
    """A stream uses pinned memory behind the main stream, whose earlier copies to it are made."""
    _make(1, tensors)


def _make(end: int, tensors: Iterable[torch.Tensor]) -> None:
    """Make the copies whose source (0) or target (1) shares memory with one of the tensors."""
    copies = _copies()
    if copies.to_host:
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        due = [pair for pair in copies.to_host if pair[end].untyped_storage().data_ptr() in places]
        copies.to_host = [pair for pair in copies.to_host if all(pair is not other for other in due)]
        for source, target in due:
            target.copy_(source)


def wait() -> None:
    """The host waits for the device."""
    copies, _of_thread.copies = _copies(), _Copies()
    for source, target in copies.to_host:
        target.copy_(source)
    for source, copied in copies.from_host:
        if not torch.equal(_bytes(source), _bytes(copied)):
            raise AssertionError(f"pinned memory of shape {tuple(source.shape)} was written before it was copied")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _copies() -> _Copies:
    if not hasattr(_of_thread, "copies"):
        _of_thread.copies = _Copies()
    copies: _Copies = _of_thread.copies
    return copies
