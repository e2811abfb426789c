"""torch's mode of tensors without data, in threads that end."""

from __future__ import annotations

import functools
import threading

import torch
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
