"""Chooses ports for servers that get their port some time before they listen.

A port that the system has chosen may be chosen again until the server listens: any program that connects somewhere gets
one. So these are ports that the system gives only to who asks for their numbers.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

_LOWEST = 10_000
_CHOSEN_BY_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_CHOSEN = 49_152
"""Of other systems: RFC 6335."""
_MOST_TRIES = 100
"""For each port."""


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Different ports of an address on which nobody listens, and which no program gets by chance.

    Raises:
        OSError: there are not as many.

    >>> len(set(free_ports(3)))
    3
    """
    lowest_chosen = _LOWEST_CHOSEN
    with suppress(OSError):
        lowest_chosen = int(_CHOSEN_BY_SYSTEM.read_text().split()[0])
    # where the system chooses from nearly all ports, those are as good as others
    candidates = range(_LOWEST, lowest_chosen if lowest_chosen > 2 * _LOWEST else 2**16)
    found: list[int] = []
    for port in secrets.SystemRandom().sample(candidates, min(_MOST_TRIES * count, len(candidates))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((address, port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{count} ports of {address} were asked for, but only {len(found)} are free")
