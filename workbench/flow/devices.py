"""Device names of programs: ``gpu`` and ``cuda`` are whatever the ranks work on, the CPU where there is no GPU."""

from __future__ import annotations

import torch

from workbench.errors import PlacementError
from workbench.flow.joining import join

_TYPES = ("cuda", "gpu", "cpu")


def device_type(name: str) -> str:
    """``"cpu"`` or ``"cuda"``: a rank works on one device, and all names of ranks mean that one.

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


def torch_device(device: str | torch.device) -> torch.device:
    """The device of local tensors: this rank's own, for every name of one."""
    device_type(torch.device(device).type if device != "gpu" else "gpu")
    return join().device
