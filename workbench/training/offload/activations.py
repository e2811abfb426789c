"""Activations in host memory from forward to backward: ``offload=activations`` of a strategy.

What autograd saves in a module's forward goes, storage by storage, to host memory, and comes back when its backward
asks for it. Several tensors that show one storage (queries, keys and values of one product) are stored once, and are
views of one storage afterwards. Parameters, and what is small, stay. On CPUs the memory is a mapped file, and backward
works on its pages; for a GPU ``DeviceCopies`` copies out and in.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from workbench.errors import CaptureError
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.kept_for_backward import Kept, keep, unchanged
from workbench.tensors.world import World
from workbench.training.offload.host_memory import host_memory

MIN_BYTES = 2**16
"""Smaller storages stay."""
PREFETCHED = 2
"""Number of storages that come ahead of the one that backward needs."""
_LEAST_SHARE = 8
"""A storage is offloaded for a tensor that shows at least one of so many parts of it."""


class Stored:
    """The bytes of one storage: in ``memory`` of the host, and ``here`` on the device as long as they are there.

    Attributes:
        number: of the storages of one call, in the order in which forward saves them.
        version: of the memory when it was saved.
        event: behind which they are in the host's memory, or have come back.
    """

    def __init__(self, memory: torch.Tensor, number: int, version: int, on_release: Callable[[Stored], None]) -> None:
        self.memory, self.number, self.version, self._on_release = memory, number, version, on_release
        self.here: torch.Tensor | None = None
        self.event: Any = None

    def __del__(self) -> None:
        self._on_release(self)


class _Saved(NamedTuple):
    """A saved tensor: a view of a storage."""

    stored: Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Call:
    """What one call of a module saves."""

    def __init__(self, owner: OffloadedActivations) -> None:
        self._owner = owner
        self._outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.only_moves = self._outer is None
        """Whether functions may save other tensors than without hooks."""
        self._stored: list[weakref.ref[Stored]] = []
        self._by_address: dict[int, tuple[weakref.ref[Any], weakref.ref[Stored]]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves a tensor."""
        with local_torch(), torch.no_grad(), hidden_from_modes():
            if self._owner.takes(tensor):
                stored = self._store(tensor.untyped_storage(), tensor._version)
                return _Saved(stored, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return keep(tensor) if self._outer is None else self._outer[0](tensor)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Backward needs a tensor."""
        if isinstance(saved, Kept):
            return unchanged(saved)
        if not isinstance(saved, _Saved):
            found: torch.Tensor = self._outer[1](saved)
            return found
        with local_torch(), torch.no_grad(), hidden_from_modes():
            number = saved.stored.number
            before = [self._stored[place]() for place in range(number - 1, max(-1, number - 1 - PREFETCHED), -1)]
            flat = self._owner.bring_back(saved.stored, [one for one in before if one is not None])
            made = torch.empty(0, dtype=saved.dtype, device=flat.device)
            return made.set_(flat.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _store(self, storage: torch.UntypedStorage, version: int) -> Stored:
        known = self._by_address.get(storage.data_ptr())
        if known is not None and known[0]() is storage:  # else another storage has its address
            stored = known[1]()
            if stored is not None and stored.version == version:
                return stored
        stored = self._owner.store(storage, len(self._stored), version, self._outer)
        self._stored.append(weakref.ref(stored))
        self._by_address[storage.data_ptr()] = weakref.ref(storage), weakref.ref(stored)
        return stored


class OffloadedActivations:
    """Offloads what autograd saves in the calls of a module; ``hooks`` are on it until they are removed."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._world = world
        self._memory = host_memory(world.device)
        self._copies = None if world.device.type == "cpu" else DeviceCopies(world.device)
        self._open: list[AbstractContextManager[None]] = []
        self._own: set[int] = set()
        self.hooks = [  # functions, which copies of the module share
            module.register_forward_pre_hook(lambda called, *_: self._begin(called), prepend=True),
            module.register_forward_hook(lambda *_: self._end(), always_call=True),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedActivations:
        """A copied module shares its host memory."""
        return self

    def end_all(self) -> None:
        """End calls that were broken off."""
        while self._open:
            self._end()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is offloaded."""
        if not isinstance(tensor, GlobalTensor) and type(tensor) is not torch.Tensor:
            return False  # a parameter, or a tensor of a class whose memory is its own matter
        if isinstance(tensor, GlobalTensor) and tensor._spec.is_placeholder:
            return False
        if tensor.layout is not torch.strided or tensor.device.type != self._world.device.type:
            return False
        size, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage()
        fits = storage.nbytes() >= MIN_BYTES and size <= storage.nbytes() <= _LEAST_SHARE * size
        return fits and storage.data_ptr() not in self._own and not tensor.is_conj() and not tensor.is_neg()

    def store(self, storage: torch.UntypedStorage, number: int, version: int, outer: Any) -> Stored:
        """Begin to copy a storage out."""
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        memory, size = self._memory.allocate(flat.numel()), flat.numel()
        count = getattr(getattr(outer[0], "__self__", None), "count_offloaded", None) if outer is not None else None

        def on_release(stored: Stored) -> None:
            self._memory.free(stored.memory)
            if count is not None:
                count(-size)

        stored = Stored(memory, number, version, on_release)
        if count is not None:
            count(size)
        if self._copies is not None:
            self._copies.copy_out(stored, flat)
        else:
            memory.copy_(flat)
            self._memory.release(memory)
        return stored

    def bring_back(self, stored: Stored, following: list[Stored]) -> torch.Tensor:
        """The bytes on the device; those that backward needs next begin to come."""
        if self._copies is not None:
            return self._copies.bring_back(stored, following)
        for one in following[:1]:
            self._memory.will_read(one.memory)
        return stored.memory

    def _begin(self, module: nn.Module) -> None:
        if self._world.context.recorder is not None:
            raise CaptureError(
                "capture: a module under offload=activations, of which 0 activations can be offloaded in a captured "
                "step, because a replay holds the values of the step itself. Bound their memory with "
                "wb.capture(step, memory_bytes=), or leave offload=activations out of the strategy."
            )
        with local_torch():
            kept = (*module.parameters(), *module.buffers())
            self._own = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.layout is torch.strided}
        call = _Call(self)
        self._open.append(torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack))
        self._open[-1].__enter__()

    def _end(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


MAX_LEAVING = 4
"""Number of storages that leave at a time."""


class DeviceCopies:
    """Storages of one rank on their way between a GPU and pinned memory, on a stream of their own.

    The host waits for none of them. Forward keeps the last few storages until they are copied; from then on the main
    stream waits for each, so that no more are alive. Backward has the next few come while it works on one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._leaving: deque[Stored] = deque()

    def copy_out(self, stored: Stored, flat: torch.Tensor) -> None:
        """Begin to copy the bytes of a storage to the host."""
        self._stream.wait_stream(self._module.current_stream())
        self._copy(stored, flat, stored.memory)
        stored.here = flat
        self._leaving.append(stored)
        while len(self._leaving) > MAX_LEAVING:
            self._forget(self._leaving.popleft())

    def bring_back(self, stored: Stored, following: Sequence[Stored]) -> torch.Tensor:
        """The bytes on the device, for the main stream; begins with those that are needed next."""
        for one in (stored, *following):
            self._begin(one)
        if stored in self._leaving:  # they have never left
            self._leaving.remove(stored)
        else:
            self._module.current_stream().wait_event(stored.event)
        assert stored.here is not None
        return stored.here

    def _begin(self, stored: Stored) -> None:
        if stored.here is None:
            stored.here = torch.empty(stored.memory.numel(), dtype=torch.uint8, device=self._device)
            if self._device.type == "cuda":
                stored.here.record_stream(self._stream)
            self._stream.wait_stream(self._module.current_stream())  # which has used this memory before
            self._copy(stored, stored.memory, stored.here)

    def _copy(self, stored: Stored, source: torch.Tensor, target: torch.Tensor) -> None:
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        stored.event = self._module.Event()
        stored.event.record(self._stream)

    def _forget(self, stored: Stored) -> None:
        """Free the memory on the device when it is copied: whatever gets it comes behind the copy."""
        self._module.current_stream().wait_event(stored.event)
        stored.here = None
