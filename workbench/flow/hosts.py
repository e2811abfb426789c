"""The devices of a world under the names of scopes: ``"0:1"`` is device 1 of host 0."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core.placement import Placement
from workbench.errors import PlacementError
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World
from workbench.transport.rendezvous import host_name

_GRAMMAR = re.compile(r"@?(\d+):(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """Devices ``first`` to ``last`` of a host, both included. ``parse(str(x)) == x``."""

    host: int
    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> DeviceRange:
        """Read ``"0:1"`` or ``"0:0-3"``.

        Raises:
            PlacementError: the text has another form.
        """
        found = _GRAMMAR.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None:
            raise PlacementError(
                f"device {text!r} does not parse. Devices are written host:device or host:first-last, "
                'e.g. "0:1" for device 1 of host 0, or ["0:0-3", "1:0-3"].'
            )
        host, first = int(found[1]), int(found[2])
        last = first if found[3] is None else int(found[3])
        if last < first:
            raise PlacementError(
                f"device {text!r} goes from {first} to {last}. The first of a range is not above the last: "
                f'write "{host}:{last}-{first}".'
            )
        return cls(host, first, last)

    def __str__(self) -> str:
        return f"{self.host}:{self.first}" + (f"-{self.last}" if self.last > self.first else "")


def parse_devices(devices: str | Sequence[str]) -> tuple[DeviceRange, ...]:
    """Read one range of devices, or a list of them.

    >>> [str(part) for part in parse_devices(["0:0-1", "1:2"])]
    ['0:0-1', '1:2']
    """
    listed = [devices] if isinstance(devices, str) else list(devices)
    if not listed:
        raise PlacementError(f'devices {devices!r}: 0 devices, at least 1 is needed, e.g. "0:0".')
    return tuple(DeviceRange.parse(text) for text in listed)


def in_grid(ranks: Sequence[int], hierarchy: Any) -> Any:
    """A flat list of ranks as nested lists with the sizes of ``hierarchy``.

    Raises:
        PlacementError: it has more or fewer places than there are ranks.
    """
    if hierarchy is None:
        return ranks
    sizes = tuple(hierarchy)
    count = math.prod(sizes)
    if count != len(ranks):
        raise PlacementError(
            f"placement: hierarchy {sizes} has {count} places for {len(ranks)} ranks. Each rank has one place: give "
            "sizes whose product is the number of ranks, or nested lists: flow.placement(ranks=[[0, 1], [2, 3]])."
        )
    return np.reshape(ranks, sizes).tolist()


@dataclass(frozen=True)
class Devices:
    """The ranks of a world by host: ``by_host[1][2]`` is the rank that is device 2 of host 1."""

    device_type: str
    by_host: tuple[tuple[int, ...], ...]

    @classmethod
    def of_world(cls, world: World) -> Devices:
        """The devices of a world. All ranks call it. Hosts are counted in the order of their first ranks."""
        names = all_gather_object(host_name(), world, "the hosts of the ranks")
        hosts = dict.fromkeys(names)
        by_host = tuple(tuple(rank for rank, name in enumerate(names) if name == host) for host in hosts)
        return cls(world.device.type, by_host)

    def ranks(self, wanted: Iterable[DeviceRange], what: str) -> list[int]:
        """The ranks that these ranges name, in their order. Errors begin with ``what``.

        Raises:
            PlacementError: a host or device does not exist, or a device is named twice.
        """
        ranks: list[int] = []
        for part in wanted:
            there = self.by_host[part.host] if part.host < len(self.by_host) else ()
            if part.last >= len(there):
                raise PlacementError(f"{what}: there is no device {part}. There are {self}. Name some of those.")
            ranks += there[part.first : part.last + 1]
        if len(set(ranks)) < len(ranks):
            raise PlacementError(f"{what}: {len(ranks)} devices, {len(set(ranks))} different ones. Name each once.")
        return ranks

    def first(self, num_per_host: int | None, num_hosts: int | None, what: str) -> list[int]:
        """The first devices of the first hosts, all of them by default."""
        hosts = self.by_host[:num_hosts]
        if num_hosts is not None and num_hosts > len(self.by_host):
            raise PlacementError(f"{what}: {num_hosts} hosts are asked for. There are {self}.")
        if num_per_host is not None and any(num_per_host > len(ranks) for ranks in hosts):
            raise PlacementError(
                f"{what}: {num_per_host} devices of each host are asked for. There are {self}. Ask for fewer, or "
                f"start more engines: wb.Session(engines={num_per_host})."
            )
        return [rank for ranks in hosts for rank in ranks[:num_per_host]]

    def placement(self, ranks: Sequence[int], hierarchy: Sequence[int] | None = None) -> Placement:
        """A placement on ranks, as one axis or in the shape ``hierarchy``."""
        return Placement.of(self.device_type, in_grid(ranks, hierarchy))

    def __str__(self) -> str:
        parts = [f'"{DeviceRange(host, 0, len(ranks) - 1)}"' for host, ranks in enumerate(self.by_host) if ranks]
        return f"{sum(map(len, self.by_host))} {self.device_type} devices: {', '.join(parts)}"
