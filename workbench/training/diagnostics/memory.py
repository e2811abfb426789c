"""Memory of one rank: live storages by kind, and the process's peak above a warm baseline."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import psutil
import torch
from torch import nn

from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.kept_for_backward import Kept, keep, unchanged
from workbench.training.gradients.nested_steps import state_tensors
from workbench.training.offload.host_memory import is_offloaded


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int] | None = None) -> int:
    """Bytes of the distinct storages of this rank's shards, without those whose addresses are in ``seen``, which gets
    them all; a placeholder's single zero does not count.
    """
    total, seen = 0, set() if seen is None else seen
    found = list(tensors)  # an iterator over gradients takes them as the program does
    with local_torch():
        for tensor in found:
            if tensor.layout is not torch.strided:
                tensor = tensor.to_sparse_coo().coalesce().values()  # without its indices
            storage = tensor.untyped_storage()
            is_placeholder = isinstance(tensor, GlobalTensor) and tensor.is_placeholder
            if not is_placeholder and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total


def model_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes on this rank of parameters, gradients, optimizer state and buffers."""
    return {
        "parameters": storage_bytes(model.parameters()),
        "gradients": storage_bytes(gradients(model)),
        "optimizer": storage_bytes(optimizer_state(optimizer)),
        "buffers": storage_bytes(model.buffers()),
    }


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradients that the parameters have, terms of sums or shards."""
    found = (parameter.grad for parameter in model.parameters())
    return [grad for grad in found if grad is not None]


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer's state that are not offloaded."""
    return [tensor for tensor in state_tensors(optimizer) if not is_offloaded(tensor)]


def offloaded_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state in host memory, or on CPUs in files."""
    return sum(tensor.nbytes for tensor in state_tensors(optimizer) if is_offloaded(tensor))


class ActivationMeter:
    """Counts the bytes that autograd holds for backward, in one measured step: at the moment when they are most.

    Under a schedule that is only some of the micro-batches: what a backward has used is given back. ``held_bytes`` are
    held now, ``size_bytes`` were held at most, and ``offloaded_bytes`` at most beside the device. ``parameters`` are
    none of them, nor are those of the models. ``on_change`` is called after each change of ``held_bytes``.
    """

    def __init__(
        self,
        *models: nn.Module,
        parameters: Iterable[torch.Tensor] = (),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        own = [*parameters, *(p for model in models for p in model.parameters())]
        with local_torch():
            self._own = {p.untyped_storage().data_ptr() for p in own}
        self._on_change = on_change
        self._holders: dict[int, int] = {}  # by address of a storage
        self.held_bytes = self.size_bytes = 0
        self._offloaded_now = self.offloaded_bytes = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Context around the forwards of the step."""
        with torch.autograd.graph.saved_tensors_hooks(self.count, _unpack):
            yield

    def count(self, tensor: Any) -> Any:
        """Count a tensor that is kept for backward, as long as the result of this call lives."""
        kept = keep(tensor)
        with local_torch():
            if tensor.layout is not torch.strided:
                return kept  # the program's own: operands, and their gradients, are strided
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if address in self._own or tensor.numel() * tensor.element_size() > size:
                return kept
        self._count(address, size, 1)
        return _SavedTensor(kept, lambda: self._count(address, size, -1))

    def count_offloaded(self, change: int) -> None:
        """Count bytes that go to host memory, or negative ones that nobody needs any more."""
        self._offloaded_now += change
        self.offloaded_bytes = max(self.offloaded_bytes, self._offloaded_now)

    def _count(self, address: int, size: int, change: int) -> None:
        before = self._holders.get(address, 0)
        self._holders[address] = before + change
        self.held_bytes += size * ((before + change > 0) - (before > 0))
        self.size_bytes = max(self.size_bytes, self.held_bytes)
        self._on_change()


class _SavedTensor:
    """A tensor that autograd has saved. It reports when autograd releases it."""

    __slots__ = ("_on_release", "kept")

    def __init__(self, kept: Kept, on_release: Callable[[], None]) -> None:
        self.kept, self._on_release = kept, on_release

    def __del__(self) -> None:
        self._on_release()


def _unpack(saved: Any) -> Any:
    return unchanged(saved.kept if isinstance(saved, _SavedTensor) else saved)


_meters: WeakSet[PeakMeter] = WeakSet()
"""Of this process, those of CPUs: what records holds no memory of an accelerator's allocator."""


@contextmanager
def uncounted_in_peaks() -> Iterator[None]:
    """Context around work between two steps that is not the program's, such as a profiler's, or around steps that are
    recorded. What is held at its highest point belongs to no peak, and what stays belongs to no growth.
    """
    meters = list(_meters)
    for meter in meters:
        meter.pause()
    try:
        yield
    finally:
        for meter in meters:
            meter.resume()


class PeakMeter:
    """Peak memory of this process above where it stood when the meter was made.

    On Linux CPUs: peak resident size without pages of files that came meanwhile (libraries, in the first run of a
    process, and data), with the kernel's mark reset and freed pages given back first; at least what was allocated and
    is held when it is asked, since the resident size falls where the kernel takes back pages of files or buffers from
    before are unmapped. On CUDA: the allocator's peak. Elsewhere: the largest resident size at the moments when it was
    asked.

    ``collects_garbage``: first free what only cycles hold, so that its pages do not hide the run's. This takes up to
    half a second: not where other ranks live in the same process, or where the peak is not of interest.
    """

    def __init__(self, device: torch.device, collects_garbage: bool = True) -> None:
        self.device = device
        self._turn, self._num_pauses = threading.Lock(), 0
        self._before: tuple[int, dict[str, int]] = 0, {}  # what was held at the beginning of a pause
        if collects_garbage:
            gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._baseline = torch.cuda.memory_allocated(device)
            return
        _return_freed_pages()
        self._can_reset = _reset_peak()
        self._baseline, self._resident = self._held()
        self._largest = 0
        _meters.add(self)

    def start_again(self) -> None:
        """Forget the highest point so far; the baseline stays."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        _return_freed_pages()
        _reset_peak()
        self._largest = 0

    def peak_bytes(self) -> int:
        """Bytes above the baseline, at the highest point since the meter was made or started again."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._baseline
        if self.is_paused:
            return self._largest
        if not self._can_reset:
            self._largest = max(self._largest, psutil.Process().memory_info().rss - self._baseline)
            return self._largest
        grown = {kind: max(0, size - self._resident[kind]) for kind, size in _resident_bytes().items()}
        files = grown.pop(_FILES)
        peak = _status_bytes("VmHWM")["VmHWM"] - self._baseline - files
        self._largest = max(self._largest, peak, sum(grown.values()))
        return self._largest

    @property
    def is_paused(self) -> bool:
        """Whether what is held now does not count."""
        return self._num_pauses > 0

    def pause(self) -> None:
        """Count nothing until as many calls of ``resume``: of this pause and of those around it or in other threads."""
        with self._turn:
            if not self.is_paused:
                self.peak_bytes()
                _return_freed_pages()
                self._before = self._held()
            self._num_pauses += 1

    def resume(self) -> None:
        """Count again, above a baseline that has moved by what the process has grown or shrunk in the pause."""
        with self._turn:
            self._num_pauses -= 1
            if self.is_paused:
                return
            total, resident = self._before
            _return_freed_pages()
            now, resident_now = self._held()
            self._baseline += now - total
            for kind, size in resident_now.items():
                self._resident[kind] += size - resident[kind]
            _reset_peak()

    def _held(self) -> tuple[int, dict[str, int]]:
        """Resident bytes, in all and by kind."""
        return psutil.Process().memory_info().rss, _resident_bytes() if self._can_reset else {}


def _return_freed_pages() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return


def _reset_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return True
    except OSError:
        return False


_FILES = "RssFile"


def _resident_bytes() -> dict[str, int]:
    """Resident bytes of this process: its own, those that it shares with other ranks, and those of files."""
    return _status_bytes("RssAnon", "RssShmem", _FILES)


def _status_bytes(*names: str) -> dict[str, int]:
    """Entries of the kernel's account of this process."""
    with open("/proc/self/status") as file:
        entries = (line.split() for line in file if line.startswith(names))
        return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in entries}
