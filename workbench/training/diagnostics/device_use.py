"""What a rank's GPU does and holds, for the live view: of all its processes, and of this one."""

from __future__ import annotations

from contextlib import suppress

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
        self._device, self._has_nvml = device, device.type != "cpu"
        self._of_device = torch.get_device_module(device)

    def read(self, precision: str) -> dict[str, float]:
        """Entries of ``core.metrics.DEVICE_KINDS`` that are known here; none on a CPU."""
        if self._device.type == "cpu":
            return {}
        found: dict[str, float] = {}
        with suppress(AttributeError):  # a device of torch other than CUDA may lack them
            free, total = self._of_device.mem_get_info(self._device)
            found |= {"used": total - free, "total": total}
            found["pool"] = self._of_device.memory_reserved(self._device)
            name = self._of_device.get_device_name(self._device)
            found["peak_flops_per_s"] = peak_flops_per_s(name, precision) or 0.0
        if self._has_nvml:
            try:
                found["busy"] = self._of_device.utilization(self._device) / 100
            except Exception:  # noqa: BLE001 - NVML's errors are of a package that may be missing; slices (MIG) have none
                self._has_nvml = False
        return {kind: value for kind, value in found.items() if value}


__all__ = ["DeviceMeter"]
