"""The notebook's side of a cluster of engines, and what runs on the engines to serve it.

Engines import `workbench.session.engine` from here, so the notebook's side is loaded on first use only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.session.cluster import Session, current, find_current
    from workbench.session.remote_call import RemoteCall
    from workbench.session.run import CellResult

__all__ = ["CellResult", "RemoteCall", "Session", "current", "find_current"]

_HOMES = {
    "Session": "workbench.session.cluster",
    "current": "workbench.session.cluster",
    "find_current": "workbench.session.cluster",
    "CellResult": "workbench.session.run",
    "RemoteCall": "workbench.session.remote_call",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
