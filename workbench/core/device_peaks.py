"""Peaks of GPUs by their datasheets: operations per second of dense products, without sparsity and without TF32."""

from __future__ import annotations

_TERA = 1e12
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250, 75),
    ("H200", 989, 67),
    ("H100 PCIe", 756, 51),
    ("H100 NVL", 835, 60),
    ("H100", 989, 67),
    ("A100", 312, 19.5),
    ("A40", 149.7, 37.4),
    ("A10", 125, 31.2),
    ("L40S", 362, 91.6),
    ("L4", 121, 30.3),
    ("V100", 125, 15.7),
    ("T4", 65, 8.1),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71, 35.6),
)
"""Part of the name, the rate in 16 bits (V100 and T4: fp16 only), the rate of fp32. The first one that fits counts."""


def peak_flops_per_s(name: str, precision: str) -> float | None:
    """The peak of a GPU with this name for "fp32", "bf16" or "fp16"; None for a slice, or one that no row names.

    >>> peak_flops_per_s("NVIDIA H100 80GB HBM3", "bf16")
    989000000000000.0
    >>> peak_flops_per_s("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16") is None
    True
    """
    for part, in_16_bits, in_32_bits in _PEAKS:
        if part in name and "MIG" not in name:
            return _TERA * (in_32_bits if precision == "fp32" else in_16_bits)
    return None
