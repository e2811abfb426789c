"""The interactive workbench for parallel training.

    import workbench as wb
    wb.init()
    p = wb.placement("cpu", ranks=[0, 1])
    x = wb.randn(4, 5, placement=p, sbp=wb.sbp.split(0))
    w = wb.randn(5, 8, placement=p, sbp=wb.sbp.broadcast)
    (x @ w).shape                       # (4, 8), computed in two halves

Names are loaded when they are first used: importing the package loads neither torch nor plotly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.session import current as current

__version__ = "0.1.0"

_WHERE = {
    "workbench.core": ["sbp"],
    "workbench.core.strategy": ["Strategy"],
    "workbench.api": [
        "Checkpoints", "GlobalDataLoader", "GlobalTensor", "GradScaler", "arange", "balance", "barrier",
        "boxing_plan", "capture", "check_agreement", "dry_run", "empty", "evaluate", "explicit_boxing",
        "export_safetensors", "eye", "find_nonfinite", "forward_backward", "full", "init", "load",
        "load_safetensors", "local_map", "manual_seed", "memory_report", "no_sync", "ones", "parallelize",
        "placement", "prove", "rand", "randint", "randn", "randperm", "rank", "rebuild",
        "rule", "save", "tensor", "timeline", "to_global", "to_global_many", "trace", "world_size", "zeros",
    ],
    "workbench.training.runs.own_loops": ["log"],
    "workbench.session": ["Session", "current"],
    "workbench.session.calibrating": ["calibrate"],
    "workbench.planner.sweep": ["simulate"],
    "workbench.session.comparing.compare": ["compare"],
    "workbench.session.planning": ["layer_costs", "plan"],
    "workbench.session.comparing.saved_runs": ["SavedRuns"],
    "workbench.ui.live.own_live": ["LiveView"],
    "workbench.ui.runs.showing": ["show_runs"],
    "workbench.ui.pictures.matmul": ["draw_matmul"],
    "workbench.ui.pictures.network": ["draw_network"],
    "workbench.ui.pictures.boxing": ["draw_boxing"],
    "workbench.ui.pictures.stages": ["draw_stages"],
    "workbench.ui.pictures.timeline": ["draw_timeline"],
    "workbench.ui.widgets": ["Panel"],
    "workbench": ["errors", "flow", "testing"],
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    module_name = _MODULE_OF.get(name)
    if module_name is None:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    import importlib

    if name in ("errors", "flow", "testing", "sbp"):
        value: Any = importlib.import_module(f"{module_name}.{name}")
    else:
        value = getattr(importlib.import_module(module_name), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext workbench``: registers ``%%global``, ``%workbench``, ``%push`` and ``%pull``."""
    from workbench.session import magic

    magic.load_ipython_extension(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """``%unload_ext workbench``."""
    from workbench.session import magic

    magic.unload_ipython_extension(ipython)
