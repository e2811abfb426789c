"""The number of devices that jobs run on: ``flow.config.gpu_device_num(2)``."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import JobError

__all__ = ["cpu_device_num", "gpu_device_num", "machine_num"]


@dataclass(frozen=True)
class DeviceLimits:
    """The number of devices that jobs use; None for all."""

    num_devices: int | None = None
    num_hosts: int | None = None


_chosen = DeviceLimits()


def gpu_device_num(value: int) -> None:
    """Let jobs run on this many devices of each host: GPUs, or engines on the CPU without GPUs.

    If no session runs, the first job call starts one with this number of engines.
    """
    global _chosen
    _chosen = DeviceLimits(_positive("gpu_device_num", value), _chosen.num_hosts)


def cpu_device_num(value: int) -> None:
    """The same as ``gpu_device_num``: engines work on GPUs if there are some."""
    global _chosen
    _chosen = DeviceLimits(_positive("cpu_device_num", value), _chosen.num_hosts)


def machine_num(value: int) -> None:
    """Let jobs run on this many hosts."""
    global _chosen
    _chosen = DeviceLimits(_chosen.num_devices, _positive("machine_num", value))


def chosen() -> DeviceLimits:
    """The present limits."""
    return _chosen


def reset() -> None:
    """Drop the limits: jobs run on all devices."""
    global _chosen
    _chosen = DeviceLimits()


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise JobError(f"flow.config.{name}({value!r}): a number of 1 or more is needed, e.g. {name}(2).")
    return value
