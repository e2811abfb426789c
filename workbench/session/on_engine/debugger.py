"""A debugger on this rank: debugpy listens on loopback, and an editor attaches."""

from __future__ import annotations

import sys
from typing import Any

_port: int | None = None
_debugger_hook = sys.breakpointhook


def install() -> None:
    """Let ``breakpoint()`` print how to start a debugger while none listens. Without this it does nothing."""
    global _debugger_hook
    if sys.breakpointhook is not _print_how_to_attach:
        _debugger_hook, sys.breakpointhook = sys.breakpointhook, _print_how_to_attach


def _print_how_to_attach(*args: Any, **kwargs: Any) -> None:
    print(
        "breakpoint() was passed: no debugger listens on this rank. Start one with %workbench debug --ranks <rank>",
        file=sys.stderr,
    )


def listen() -> int:
    """The port on 127.0.0.1 where a debugger can attach. The first call begins to listen.

    debugpy asks for no password: every process that can connect to this host's loopback can then run code as this
    user.
    """
    global _port
    if _port is None:
        import debugpy

        sys.breakpointhook = _debugger_hook
        _port = int(debugpy.listen(("127.0.0.1", 0))[1])
    return _port
