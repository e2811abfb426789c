"""The interactive workbench for parallel training.

    import workbench as wb
    wb.init()
    p = wb.placement(ranks=[0, 1])
    x = wb.randn(4, 5, placement=p, sbp=wb.sbp.split(0))
    w = wb.randn(5, 8, placement=p, sbp=wb.sbp.broadcast)
    (x @ w).shape                       # (4, 8), computed in two halves

Names are loaded when they are first used: importing the package loads neither torch nor plotly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.lazy import lazy_names
from workbench.renamed import RENAMED

if TYPE_CHECKING:
    from workbench import checkpoint as checkpoint
    from workbench import debug as debug
    from workbench import draw as draw
    from workbench import errors as errors
    from workbench import flow as flow
    from workbench import planner as planner
    from workbench import testing as testing
    from workbench.api import GlobalDataLoader as GlobalDataLoader
    from workbench.api import GlobalTensor as GlobalTensor
    from workbench.api import arange as arange
    from workbench.api import barrier as barrier
    from workbench.api import capture as capture
    from workbench.api import empty as empty
    from workbench.api import evaluate as evaluate
    from workbench.api import eye as eye
    from workbench.api import forward_backward as forward_backward
    from workbench.api import full as full
    from workbench.api import init as init
    from workbench.api import local_map as local_map
    from workbench.api import manual_seed as manual_seed
    from workbench.api import no_sync as no_sync
    from workbench.api import ones as ones
    from workbench.api import parallelize as parallelize
    from workbench.api import placement as placement
    from workbench.api import rand as rand
    from workbench.api import randint as randint
    from workbench.api import randn as randn
    from workbench.api import randperm as randperm
    from workbench.api import rank as rank
    from workbench.api import rebuild as rebuild
    from workbench.api import register_rule as register_rule
    from workbench.api import shutdown as shutdown
    from workbench.api import tensor as tensor
    from workbench.api import to_global as to_global
    from workbench.api import world_size as world_size
    from workbench.api import zeros as zeros
    from workbench.core import sbp as sbp
    from workbench.core.strategy import Strategy as Strategy
    from workbench.session.cluster import Session as Session
    from workbench.session.comparison.compare import compare as compare
    from workbench.training.runs.user_loops import log as log
    from workbench.ui.live.live_view import LiveView as LiveView
    from workbench.ui.panel import Panel as Panel

__version__ = "0.2.0"

_HOMES = {
    "workbench.api": [
        "GlobalDataLoader", "GlobalTensor", "arange", "barrier", "capture", "empty", "evaluate", "eye",
        "forward_backward", "full", "init", "local_map", "manual_seed", "no_sync", "ones", "parallelize", "placement",
        "rand", "randint", "randn", "randperm", "rank", "rebuild", "register_rule", "shutdown", "tensor", "to_global",
        "world_size", "zeros",
    ],
    "workbench.core.sbp": ["sbp="],
    "workbench.core.strategy": ["Strategy"],
    "workbench.session.cluster": ["Session"],
    "workbench.session.comparison.compare": ["compare"],
    "workbench.training.runs.user_loops": ["log"],
    "workbench.ui.live.live_view": ["LiveView"],
    "workbench.ui.panel": ["Panel"],
    "workbench.checkpoint": ["checkpoint="],
    "workbench.debug": ["debug="],
    "workbench.draw": ["draw="],
    "workbench.planner": ["planner="],
}  # fmt: skip
_MODULES = {f"workbench.{name}": [f"{name}="] for name in ("errors", "flow", "testing")}
"""Parts that can be used without an import of their own; ``from workbench import *`` leaves them out."""

if not TYPE_CHECKING:  # type checkers would take every name
    __getattr__, __dir__, _names = lazy_names(__name__, _HOMES | _MODULES, RENAMED)
    __all__ = [name for name in _names if name not in ("errors", "flow", "testing")]


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext workbench``: registers ``%%global``, ``%workbench``, ``%push`` and ``%pull``."""
    from workbench.session import magic

    magic.load_ipython_extension(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """``%unload_ext workbench``."""
    from workbench.session import magic

    magic.unload_ipython_extension(ipython)
