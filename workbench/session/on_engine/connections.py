"""Ends waits for other ranks that nothing else can end: those in C++ of torch.distributed.

gloo has no call that ends a wait, but it gives up when a connection breaks. So the control thread breaks this process's
connections to the other ranks on this host, and the waiting call raises. The ranks join a new world afterwards anyway.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

_are_broken = False


def break_to(pids: Iterable[int]) -> int:
    """Break the TCP connections between this process and others of this host; returns their number."""
    global _are_broken
    others = {(found.raddr, found.laddr) for pid in pids if pid != os.getpid() for found in _connections(pid)}
    number = 0
    for found in _connections(os.getpid()):
        if (found.laddr, found.raddr) in others:
            number += _shut_down(found)
    _are_broken = _are_broken or number > 0
    return number


def are_broken() -> bool:
    """Whether connections of the present world were broken, so that its calls raise without a mistake of the user."""
    return _are_broken


def forget() -> None:
    """A new world has connections of its own."""
    global _are_broken
    _are_broken = False


def _shut_down(found: Any) -> bool:
    """Shut a connection down, unless it has just been closed: its number may be another connection's by now."""
    try:
        with socket.socket(fileno=os.dup(found.fd)) as connection:
            if connection.getpeername()[:2] != tuple(found.raddr):
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False


def _connections(pid: int) -> list:
    import psutil

    try:
        return [found for found in psutil.Process(pid).net_connections("tcp") if found.raddr and found.fd >= 0]
    except psutil.Error:
        return []
