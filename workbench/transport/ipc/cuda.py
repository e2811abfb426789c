"""``Device`` for one NVIDIA GPU: memory of the driver's allocator, copies by ``kernels.blocks``, CUDA IPC handles.

Processes that share one GPU have run it; between GPUs it has not been tried. The modules above it are tested with
another ``Device``, and ``ipc`` tests the path between every two ranks with known bytes before it is used.

The memory does not come from torch's caching allocator. A handle names a whole allocation, which torch may split, reuse
or free while peers still read it, and its expandable segments have no such handle. Memory of the driver is exported
once and freed after all peers have closed it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from workbench.errors import WorldError
from workbench.kernels import blocks
from workbench.transport.ipc.device import HANDLE_BYTES, DeviceMemory, Event
from workbench.units import format_bytes

_LAZY_ENABLE_PEER_ACCESS = 1
_PORTABLE = 1
_ALREADY_REGISTERED = 712


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaDevice:
    """A GPU of this process; it uses torch's current streams."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self._last: CudaEvent | None = None
        self._last_stream: Any = None
        self._driver = _driver()

    def allocate(self, num_bytes: int, what: str) -> DeviceMemory:
        address = ctypes.c_uint64()
        with self._current():
            code = self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))
            if code != 0:  # torch may cache unused memory
                torch.cuda.empty_cache()
                code = self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))
            if code != 0:
                room, _ = torch.cuda.mem_get_info()
                raise WorldError(
                    f"{what}: {format_bytes(num_bytes)} on {self.torch_device} are wanted, {format_bytes(room)} are "
                    f"free ({self._error_name(code)}). Ranks of one host exchange through memory of the GPU. Use "
                    "smaller batches or fewer ranks on the GPU, or set WORKBENCH_TRANSPORT=nccl or gloo."
                )
        return self._memory(address.value, num_bytes)

    def export(self, memory: DeviceMemory) -> bytes:
        handle = _Handle()
        with self._current():
            code = self._driver.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(memory.address))
        self._check(code, "cuIpcGetMemHandle")
        return bytes(handle)

    def free(self, memory: DeviceMemory) -> None:
        with self._current():
            self._driver.cuMemFree_v2(ctypes.c_uint64(memory.address))

    def open(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """Open the memory on this process's GPU; it may lie on a GPU that this process cannot see."""
        address, copy = ctypes.c_uint64(), _Handle.from_buffer_copy(handle.ljust(HANDLE_BYTES, b"\0"))
        with self._current():
            code = self._driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), copy, _LAZY_ENABLE_PEER_ACCESS)
        self._check(code, "cuIpcOpenMemHandle")
        return self._memory(address.value, num_bytes)

    def close(self, memory: DeviceMemory) -> None:
        with self._current():
            self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(memory.address))

    def make_event(self) -> Event:
        return CudaEvent(self, torch.cuda.Event(enable_timing=False, interprocess=True))

    def open_event(self, handle: bytes) -> Event:
        try:
            event = torch.cuda.Event.from_ipc_handle(self.torch_device, handle)
            event.query()
        except RuntimeError as error:
            raise WorldError(f"a CUDA event of another process cannot be opened: {first_line(error)}") from error
        return CudaEvent(self, event)

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], counts: Sequence[int], reduction: str
    ) -> None:
        with torch.cuda.device(self.torch_device):
            if all(tensor.is_cuda for tensor in (*targets, *sources)):
                blocks.move_blocks(list(targets), list(sources), list(counts), reduction)
                return
            near = [source.to(self.torch_device, non_blocking=True) for source in sources]
            goals = [
                target if target.is_cuda else torch.empty_like(target, device=self.torch_device) for target in targets
            ]
            blocks.move_blocks(goals, near, list(counts), reduction)
            for target, goal in zip(targets, goals, strict=True):
                if target is not goal:
                    target.copy_(goal, non_blocking=True)

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin by the driver: after a failed call of the CUDA runtime, torch's next kernel would raise the error."""
        with self._current():
            code = self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE)
            )
        if code not in (0, _ALREADY_REGISTERED):
            raise WorldError(f"{format_bytes(num_bytes)} of shared memory cannot be pinned: {self._error_name(code)}")

    def unpin(self, address: int) -> None:
        with self._current():
            self._driver.cuMemHostUnregister(ctypes.c_void_p(address))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def record_in_order(self, event: CudaEvent) -> None:
        """Record ``event`` on the current stream, after a wait for the last recorded event."""
        stream = torch.cuda.current_stream(self.torch_device)
        if self._last is not None and stream != self._last_stream:
            stream.wait_event(self._last.event)
        event.event.record(stream)
        self._last, self._last_stream = event, stream

    def _memory(self, address: int, num_bytes: int) -> DeviceMemory:
        """Wrap an address as a tensor of this process's device; kernels also reach opened memory by its address."""
        with torch.inference_mode(False):  # the tensor is written inside and outside of inference mode
            storage = torch._C._construct_storage_from_data_pointer(address, self.torch_device, num_bytes)
            data = torch.empty(0, dtype=torch.uint8, device=self.torch_device).set_(storage)
        return DeviceMemory(address, data)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context current for driver calls of this thread."""
        with torch.cuda.device(self.torch_device):
            torch.cuda.current_stream().query()  # a thread has no context before its first call of the CUDA runtime
            yield

    def _check(self, code: int, call: str) -> None:
        if code != 0:
            raise WorldError(f"{self.torch_device}: {call} returns {self._error_name(code)}")

    def _error_name(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(code, ctypes.byref(name))
        return name.value.decode() if name.value else f"error {code}"


class CudaEvent:
    """An event of this process or of another one."""

    def __init__(self, device: CudaDevice, event: Any) -> None:
        self._device, self.event = device, event

    def record(self) -> None:
        self._device.record_in_order(self)

    def is_done(self) -> bool:
        return bool(self.event.query())

    def export(self) -> bytes:
        try:
            with torch.cuda.device(self._device.torch_device):  # creates an event that was not recorded yet
                return bytes(self.event.ipc_handle())
        except RuntimeError as error:
            raise WorldError(f"CUDA events cannot be shared here: {first_line(error)}") from error


@cache
def _driver() -> Any:
    """The driver's library."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise WorldError(f"the CUDA driver's library cannot be loaded: {error}") from error


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]
