"""Finds a rendezvous for engines on several hosts: the interface on the route to the controller, and its address.

torch.distributed opens connections between hosts: its store, gloo's and NCCL's. They are bound to that interface. They
ask for no password; ``docs/security.md`` says what that means.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import EngineStartError
from workbench.session.processes.folder import SessionFolder
from workbench.session.processes.ports import reserved_ports

ENGINE_SET = "WORKBENCH_ENGINE_SET"
"""The variable with the name of the engine set by which a profile has started an engine."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables in which gloo and NCCL look for their interface. A value of the user or the profile is kept."""


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """An engine's host name, address and interface, a port that is free on that host, and its engine set."""

    host: str
    address: str
    interface: str
    port: int
    engine_set: str = ""


def find_rendezvous_address(controller_address: str) -> RendezvousAddress:
    """This engine's address on the route to the controller. Makes gloo and NCCL use the interface of that address.

    Raises:
        EngineStartError: the interface that the environment names does not exist or has no address.
    """
    from workbench.transport.rendezvous import host_name

    named = os.environ.get(INTERFACE_VARIABLES[0], "").partition(",")[0]
    address = address_of(named) if named else address_towards(controller_address)
    interface = named or interface_of(address)
    for variable in INTERFACE_VARIABLES:
        if interface:
            os.environ.setdefault(variable, interface)
    with reserved_ports(1, address) as [port]:
        return RendezvousAddress(host_name(), address, interface, port, os.environ.get(ENGINE_SET, ""))


def address_towards(other: str) -> str:
    """This host's address on the route to another host. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface with that address; empty where there is none."""
    import psutil

    return next(
        (name for name, found in psutil.net_if_addrs().items() if any(each.address == address for each in found)), ""
    )


def address_of(interface: str) -> str:
    """The IPv4 address of an interface.

    Raises:
        EngineStartError: there is no such interface. The message lists the interfaces of this host.
    """
    import psutil

    known = psutil.net_if_addrs()
    for each in known.get(interface, ()):
        if each.family == socket.AF_INET:
            return str(each.address)
    raise EngineStartError(
        f"{INTERFACE_VARIABLES[0]}={interface}: host {socket.gethostname()} has no such interface with an IPv4 "
        f"address. It has {', '.join(sorted(known))}. Name one of them in the profile's environment, or leave the "
        f"variable out."
    )


def rendezvous_store(addresses: Sequence[RendezvousAddress], folder: SessionFolder) -> str:
    """The rendezvous of the ranks: a file if all are on this host, else a TCP store on rank 0's interface."""
    from workbench.transport.rendezvous import host_name

    here = host_name()
    if all(one.host == here for one in addresses):
        return folder.new_store()
    return f"tcp://{addresses[0].address}:{addresses[0].port}"


def ranks_on_hosts(hosts: Sequence[str]) -> dict[int, tuple[int, int]]:
    """By rank, its number among the ranks of its host, and how many these are.

    >>> ranks_on_hosts(["a", "a", "b"])
    {0: (0, 2), 1: (1, 2), 2: (0, 1)}
    """
    return {rank: (hosts[:rank].count(host), hosts.count(host)) for rank, host in enumerate(hosts)}
