"""The notebook's side of a cluster of engines, and what runs on the engines to serve it.

Engines import `workbench.session.engine` from here, so the notebook's side is loaded on first use only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.lazy import lazy_names

if TYPE_CHECKING:
    from workbench.session.cluster import Session as Session
    from workbench.session.cluster import current as current
    from workbench.session.cluster import find_current as find_current

_HOMES = {"workbench.session.cluster": ["Session", "current", "find_current"]}

if not TYPE_CHECKING:  # type checkers would take every name
    __getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
