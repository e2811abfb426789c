"""A debugger on this rank: debugpy listens on loopback, and an editor attaches."""

from __future__ import annotations

_port: int | None = None


def listen() -> int:
    """The port on 127.0.0.1 where a debugger can attach; listening begins with the first call.

    debugpy asks nobody for a password: whoever may connect to this host's loopback may then run code as this user.
    """
    global _port
    if _port is None:
        import debugpy

        _port = int(debugpy.listen(("127.0.0.1", 0))[1])
    return _port
