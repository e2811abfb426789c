"""Checkpoints, slice by slice, and whole weights as safetensors.

``wb.checkpoint.save("step-100", model=model, optimizer=optimizer)``, and later ``wb.checkpoint.load`` likewise, on any
number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.lazy import lazy_names

if TYPE_CHECKING:
    from workbench.training.exporting import export_safetensors as export_safetensors
    from workbench.training.saving.checkpoints import Checkpoints as Checkpoints
    from workbench.training.saving.store import load as load
    from workbench.training.saving.store import save as save
    from workbench.training.strategies.loading import load_safetensors as load_safetensors

_HOMES = {
    "workbench.training.saving.checkpoints": ["Checkpoints"],
    "workbench.training.saving.store": ["load", "save"],
    "workbench.training.exporting": ["export_safetensors"],
    "workbench.training.strategies.loading": ["load_safetensors"],
}

if not TYPE_CHECKING:  # type checkers would take every name
    __getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
