"""Reserves ports for servers that get their port some time before they listen.

A port that the system has chosen may be chosen again until the server listens: any program that connects somewhere gets
one. So these are ports that the system gives only to who asks for their numbers, and each of those who reserve ports at
the same time, such as a class that starts its sessions together, gets others.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_LOWEST = 10_000
_CHOSEN_BY_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_CHOSEN = 49_152
"""Of other systems: RFC 6335."""
_MOST_TRIES = 100
"""For each port."""


@contextmanager
def reserved_ports(count: int, address: str = "127.0.0.1") -> Iterator[list[int]]:
    """Different ports of an address on which nobody listens, and which no program gets by chance.

    While the context lasts, others who reserve ports get other ones: a UDP socket holds the number of each, and leaves
    TCP to the server.

    Raises:
        OSError: there are not as many.

    >>> with reserved_ports(3) as ports, reserved_ports(3) as others:
    ...     len({*ports, *others})
    6
    """
    lowest_chosen = _LOWEST_CHOSEN
    with suppress(OSError):
        lowest_chosen = int(_CHOSEN_BY_SYSTEM.read_text().split()[0])
    # where the system chooses from nearly all ports, those are as good as others
    candidates = range(_LOWEST, lowest_chosen if lowest_chosen > 2 * _LOWEST else 2**16)
    found: list[int] = []
    with ExitStack() as holds:
        for port in secrets.SystemRandom().sample(candidates, min(_MOST_TRIES * count, len(candidates))):
            hold = holds.enter_context(socket.socket(type=socket.SOCK_DGRAM))
            with socket.socket() as probe, suppress(OSError):
                hold.bind((address, port))
                probe.bind((address, port))
                found.append(port)
            if len(found) == count:
                yield found
                return
    raise OSError(f"{count} ports of {address} were asked for, but only {len(found)} are free")
