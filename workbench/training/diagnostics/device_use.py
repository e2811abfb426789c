"""What a rank's GPU does and holds, for the live view: of all its processes, and of this one."""

from __future__ import annotations

import re
from contextlib import suppress
from zlib import crc32

import torch


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


_TERA = 1e12
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250, 75),
    ("H200 NVL", 835, 60),
    ("G?H200", 989, 67),
    ("H100 PCIe", 756, 51),
    ("H100 NVL", 835, 60),
    ("H100", 989, 67),
    ("A100", 312, 19.5),
    ("A40", 149.7, 37.4),
    ("A10", 125, 31.2),
    ("L40S", 362, 91.6),
    ("L40", 181, 90.5),
    ("L4", 121, 30.3),
    ("V100S", 130, 16.4),
    ("V100-PCIE", 112, 14),
    ("V100", 125, 15.7),
    ("T4", 65, 8.1),
    ("RTX 4090$", 165.2, 82.6),
    ("RTX 3090$", 71, 35.6),
)
"""A pattern of whole words of the name, the rate in 16 bits (V100 and T4: fp16 only), the rate of fp32, as data sheets
have them. The first one that fits counts. Those that multiply 8 bits do so at twice the rate of 16 bits."""


def peak_flops_per_s(name: str, precision: str) -> float | None:
    """The peak of a GPU with this name for "fp32", "bf16", "fp16" or "fp8"; None for a slice, or one that no row names.

    >>> peak_flops_per_s("NVIDIA H100 80GB HBM3", "bf16")
    989000000000000.0
    >>> peak_flops_per_s("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16") is None
    True
    >>> peak_flops_per_s("NVIDIA A10G", "bf16") is None
    True
    """
    for words, in_16_bits, in_32_bits in _PEAKS:
        if re.search(rf"\b{words}\b", name) and "MIG" not in name:
            return _TERA * (in_32_bits if precision == "fp32" else in_16_bits * (2 if precision == "fp8" else 1))
    return None
