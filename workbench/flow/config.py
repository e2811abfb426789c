"""How many devices jobs run on: ``flow.config.gpu_device_num(2)``."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import JobError

__all__ = ["cpu_device_num", "gpu_device_num", "machine_num"]


@dataclass(frozen=True)
class DeviceLimits:
    """How many devices jobs use; None for all that are there."""

    num_devices: int | None = None
    num_hosts: int | None = None


_chosen = DeviceLimits()


def gpu_device_num(value: int) -> None:
    """Jobs run on this many devices of each host: GPUs, or engines on the CPU where there are none.

    Where no session runs, the first job call starts one with so many engines.
    """
    global _chosen
    _chosen = DeviceLimits(_positive("gpu_device_num", value), _chosen.num_hosts)


def cpu_device_num(value: int) -> None:
    """The same: engines work on GPUs where there are some."""
    global _chosen
    _chosen = DeviceLimits(_positive("cpu_device_num", value), _chosen.num_hosts)


def machine_num(value: int) -> None:
    """Jobs run on this many hosts."""
    global _chosen
    _chosen = DeviceLimits(_chosen.num_devices, _positive("machine_num", value))


def chosen() -> DeviceLimits:
    """What has been set."""
    return _chosen


def reset() -> None:
    """Forget what has been set: jobs run on all devices that are there."""
    global _chosen
    _chosen = DeviceLimits()


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise JobError(f"flow.config.{name}({value!r}): a number of 1 or more is needed, e.g. {name}(2).")
    return value
