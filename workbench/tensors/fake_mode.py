"""Fake tensors: shapes and dtypes without values or memory. torch's mode of them, in threads that end, and models and
batches on them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_mode(*, allow_non_fake_inputs: bool = False) -> FakeTensorMode:
    """A new ``FakeTensorMode``, for any thread.

    >>> with fake_mode():
    ...     tuple((torch.empty(2, 3) @ torch.empty(3, 4)).shape)
    (2, 4)
    """
    keep_device_guard()
    return FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs)


@functools.cache
def keep_device_guard() -> None:
    """Call it before torch enters a ``FakeTensorMode`` of its own, as its compiler does.

    A CUDA build of torch 2.11, without a GPU, gives an object that all threads use to the thread that first enters such
    a mode, and frees it when this thread ends: later modes are a segmentation fault. Here a thread that does not end is
    the first.
    """
    if not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return
    is_set = threading.Event()

    def hold() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        is_set.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="workbench-device-guard", daemon=True).start()
    is_set.wait()


class FakeTensorConverter:
    """Tensors, and whatever holds some, as fake ones of one mode; a tensor that comes twice has one fake."""

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
        self.mode, self.dtype = mode, dtype
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        """The value with every tensor replaced."""
        return torch.utils._pytree.tree_map_only(torch.Tensor, self._one, value)

    def _one(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
            with self.mode:
                fake = torch.empty(tensor.shape, dtype=dtype, device="cpu", requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = tensor, fake
        return self._made[id(tensor)][1]


def fake_state(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Fake tensors for all parameters and buffers by name; tied ones share theirs."""
    everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return FakeTensorConverter(mode, dtype)(dict(everything))


@contextmanager
def without_log() -> Iterator[None]:
    """Torch writes a traceback of its own where a function fails on fake tensors; who asked gets an error anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
