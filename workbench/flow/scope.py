"""The views of a job, and the devices of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import PlacementError
from workbench.flow.hosts import DeviceRange, parse_devices

__all__ = ["View", "consistent_view", "mirrored_view", "placement"]


@dataclass(frozen=True, slots=True)
class View:
    """How a job sees the devices: ``"consistent"`` (as one) or ``"mirrored"`` (each with arrays of its own)."""

    name: str

    def __enter__(self) -> View:
        """Check that this is the job's own view. Old programs write ``with flow.scope.consistent_view():`` in a job."""
        from workbench.flow.jobs.context import running_job

        running_job(f"scope.{self.name}_view()").check_view(self.name)
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __str__(self) -> str:
        return self.name


def consistent_view() -> View:
    """All devices act as one: a job takes and returns logical arrays, and layouts divide the work."""
    return View("consistent")


def mirrored_view() -> View:
    """Every device runs the job on its own arrays, with equal variables; their gradients are averaged."""
    return View("mirrored")


@dataclass
class placement:  # noqa: N801 - programs write flow.scope.placement("gpu", "0:1")
    """``with flow.scope.placement("gpu", "0:1"):`` runs the code inside on device 1 of host 0.

    Args:
        device_tag: ``"gpu"``, ``"cuda"`` or ``"cpu"``. Each of them means the devices of the engines.
        machine_device_ids: ``"host:device"``, ``"host:first-last"``, or a list of them.
        hierarchy: the devices as a grid of this shape.

    Raises:
        PlacementError: an argument does not parse. When the job runs: a device does not exist, or the grid has not as
            many places as there are devices.
    """

    device_tag: str
    machine_device_ids: str | Sequence[str]
    hierarchy: Sequence[int] | None = None
    ranges: tuple[DeviceRange, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            if self.device_tag not in ("gpu", "cuda", "cpu"):
                raise PlacementError(f'device type {self.device_tag!r}: known are gpu, cuda and cpu. Write "gpu".')
            self.ranges = parse_devices(self.machine_device_ids)
        except PlacementError as error:
            raise PlacementError(f"{self}: {error}") from None

    def __enter__(self) -> Any:
        from workbench.flow.jobs.context import running_job

        return running_job(str(self)).enter_scope(self)

    def __exit__(self, *exc: object) -> None:
        from workbench.flow.jobs.context import running_job

        running_job(str(self)).scopes.pop()

    def __str__(self) -> str:
        return f"scope.placement({self.device_tag!r}, {self.machine_device_ids!r})"
