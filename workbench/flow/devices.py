"""Device names of programs: ``gpu`` and ``cuda`` mean the device of the ranks, the CPU without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from workbench.errors import PlacementError
from workbench.flow.world_join import join

_TYPES = ("cuda", "gpu", "cpu")


def device_type(name: str) -> str:
    """``"cpu"`` or ``"cuda"``. A rank works on one device, and every device name means it.

    Raises:
        PlacementError: another word.
    """
    here = join()
    if name not in _TYPES:
        raise PlacementError(
            f"device {name!r}: known are {', '.join(_TYPES)}. There are {here.world_size} {here.device.type} devices "
            f'here, one for each rank: write "{here.device.type}".'
        )
    return here.device.type


def torch_device(device: Any) -> Any:
    """The device of local tensors and modules: this rank's own for any name of a GPU, such as "cuda:1".

    Returns "cpu", and values that name no device, such as a dtype, unchanged.
    """
    name = device.type if isinstance(device, torch.device) else device
    asks_gpu = isinstance(name, str) and name.partition(":")[0] in ("cuda", "gpu")
    return join().device if asks_gpu else device
