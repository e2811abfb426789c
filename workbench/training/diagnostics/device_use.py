"""What a rank's GPU does and holds, for the live view: of all its processes, and of this one."""

from __future__ import annotations

from contextlib import suppress
from zlib import crc32

import torch

from workbench.core.device_peaks import peak_flops_per_s


class DeviceMeter:
    """Reads a rank's device, and does not wait for its work.

    Args:
        device: of the rank.

    >>> DeviceMeter(torch.device("cpu")).read("fp32")
    {}
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_nvml = device, True
        self._of_device = None if device.type in ("cpu", "meta") else torch.get_device_module(device)

    def read(self, precision: str) -> dict[str, float]:
        """Entries of ``core.metrics.DEVICE_KINDS`` that are known here; none on a CPU."""
        found: dict[str, float] = {}
        if self._of_device is None:
            return found
        with suppress(AttributeError):  # a device of torch other than CUDA may lack them
            free, total = self._of_device.mem_get_info(self._device)
            found |= {"used": total - free, "total": total, "pool": self._of_device.memory_reserved(self._device)}
            properties = self._of_device.get_device_properties(self._device)
            found["gpu"] = float(crc32(str(properties.uuid).encode()))
            peak = peak_flops_per_s(properties.name, precision)
            found |= {} if peak is None else {"peak_flops_per_s": peak}
        if self._has_nvml:
            try:
                found["busy"] = self._of_device.utilization(self._device) / 100
            except Exception:  # noqa: BLE001 - NVML's errors are of a package that may be missing; slices (MIG) have none
                self._has_nvml = False
        return found
