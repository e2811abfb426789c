"""The checked device, known to torch."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.checked_device import clock, kernels, late_copies
from tests.checked_device.counts import count_wait
from tests.checked_device.kernels import DEVICE_TYPE
from tests.kernels import sync_batch_norm  # noqa: F401 - it gives kernels to the host, which computes for the device
from workbench.core import placement
from workbench.kernels import attention_dropout, blocks, cross_entropy_terms, embedding_rows, launch, random_slice


class _Module:
    """``torch.checked``: what ``torch.cuda`` is to a GPU."""

    Event, Stream = clock.Event, clock.Stream
    current_stream, stream = staticmethod(clock.current_stream), staticmethod(clock.stream)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        kernels.chosen.append(index)

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        count_wait("synchronize")

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        kernels.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return kernels.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        kernels.generator.set_state(state)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 50 * 10**9, 80 * 10**9

    def memory_reserved(self, device: Any = None) -> int:
        return 20 * 10**9

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid="5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77")

    def utilization(self, device: Any = None) -> int:
        return 90

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend(DEVICE_TYPE, _Module())
_own = torch.library.Library("aten", "IMPL", "PrivateUse1")
_own.impl("empty.memory_format", kernels.empty)
_own.impl("empty_strided", kernels.empty_strided)
_own.impl("resize_", kernels.resize_)
_own.impl("_copy_from", kernels.copy_from)
_own.impl("convolution_overrideable", kernels.convolution)
_own.impl("convolution_backward_overrideable", kernels.convolution_backward)
_own.impl("index.Tensor", partial(kernels.run, torch.ops.aten.index.Tensor))
for _name in torch._C._dispatch_get_all_op_names():
    if _name.startswith("aten::_foreach_"):  # one launch each, where torch would run a loop
        _packet, _, _overload = _name.removeprefix("aten::").partition(".")
        _own.impl(_name, partial(kernels.run, getattr(getattr(torch.ops.aten, _packet), _overload or "default")))
_host = torch.library.Library("aten", "IMPL", "CPU")
_host.impl("_pin_memory", late_copies.pin)
_host.impl("is_pinned", late_copies.is_pinned)
_autocast = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
for _op in kernels.IN_16_BITS:
    _autocast.impl(_op.name(), partial(kernels.run_in_16_bits, _op))
for _op in kernels.IN_32_BITS:
    _autocast.impl(_op.name(), partial(kernels.run_in_32_bits, _op))
_other = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
_other.fallback(torch.library.fallthrough_kernel)
_all = torch.library.Library("_", "IMPL", "PrivateUse1")
_all.fallback(kernels.run)
_workbench = torch.library.Library("workbench", "IMPL", "PrivateUse1")
_modules = (attention_dropout, blocks, cross_entropy_terms, embedding_rows, random_slice)
_found = [getattr(each, "_opoverload", each) for module in _modules for each in vars(module).values()]
for _op in {op for op in _found if isinstance(op, torch._ops.OpOverload)}:  # one launch each, as on a GPU
    _workbench.impl(_op.name(), partial(kernels.run, _op))
if launch.is_interpreted():
    launch.OWN_KERNELS.add(DEVICE_TYPE)

placement.DEVICE_TYPES = (*placement.DEVICE_TYPES, DEVICE_TYPE)
DEVICE = torch.device(DEVICE_TYPE, 0)

_clone = torch.UntypedStorage.clone


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """``copy.deepcopy`` of a tensor copies its storage, for which torch would need an allocator."""
    if storage.device.type != DEVICE_TYPE:
        return _clone(storage)
    whole = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage)
    return whole.clone().untyped_storage()


torch.UntypedStorage.clone = _clone_storage  # type: ignore[method-assign]
