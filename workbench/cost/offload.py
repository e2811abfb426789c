"""Bytes and seconds of what a strategy offloads: host memory beside GPUs, files on a disk beside CPUs."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.offload_kinds import BUCKET_BYTES
from workbench.cost.stage_settings import StageSettings

GPU_BYTES_PER_S, DISK_BYTES_PER_S = 25e9, 1e9
"""Assumed where a machine has no ``offload_bytes_per_s``: a host link of PCIe 4 with 16 lanes; a solid-state disk."""


def offload_bytes_per_s(setting: StageSettings) -> float:
    """The rate of a rank's copies out and in."""
    hardware = setting.hardware
    return hardware.offload_bytes_per_s or (DISK_BYTES_PER_S if hardware.exchanges_on_cores else GPU_BYTES_PER_S)


def offloads(setting: StageSettings, kind: str) -> bool:
    """Whether a kind (``core.offload_kinds``) is offloaded."""
    return kind in setting.offload.split("+")


def copies_s(num_bytes: float, beside_s: float, setting: StageSettings) -> float:
    """Seconds that copies add to work of ``beside_s`` seconds: a GPU copies beside its work, a CPU does both."""
    seconds = num_bytes / offload_bytes_per_s(setting)
    return seconds if setting.hardware.exchanges_on_cores else max(0.0, seconds - beside_s)


def state_here_bytes(
    state_bytes: float, parameter_bytes: Sequence[float], setting: StageSettings
) -> tuple[float, float]:
    """Bytes of an offloaded optimizer state that are on the device: (all the time, during an update in addition).

    A GPU keeps two buffers, each for a bucket of parameters. A CPU has the pages of the bucket that steps.

    Args:
        state_bytes: of the whole state of the rank.
        parameter_bytes: of each parameter of the rank.
        setting: of its stage.
    """
    total = sum(parameter_bytes)
    bucket = min(total, max([BUCKET_BYTES, *parameter_bytes])) * state_bytes / total if total else 0.0
    return (0.0, bucket) if setting.hardware.exchanges_on_cores else (min(state_bytes, 2 * bucket), 0.0)
