"""A debugger on this rank: debugpy listens on loopback, and an editor attaches."""

from __future__ import annotations

import sys
from typing import Any

_port: int | None = None
_debugger_hook = sys.breakpointhook


def install() -> None:
    """Have ``breakpoint()`` say how to get a debugger; without one it does nothing, not even that."""
    global _debugger_hook
    if sys.breakpointhook is not _tell:
        _debugger_hook, sys.breakpointhook = sys.breakpointhook, _tell


def _tell(*args: Any, **kwargs: Any) -> None:
    print(
        "breakpoint() was passed: no debugger listens on this rank. Start one with %workbench debug --ranks <rank>",
        file=sys.stderr,
    )


def listen() -> int:
    """The port on 127.0.0.1 where a debugger can attach; listening begins with the first call.

    debugpy asks nobody for a password: whoever may connect to this host's loopback may then run code as this user.
    """
    global _port
    if _port is None:
        import debugpy

        sys.breakpointhook = _debugger_hook
        _port = int(debugpy.listen(("127.0.0.1", 0))[1])
    return _port
