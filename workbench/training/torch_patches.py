"""Importing this module adds all entries to the table of torch's functions that are replaced."""

from __future__ import annotations

from workbench.tensors import install
from workbench.training import precision
from workbench.training.gradients import clip, optim, state_dicts

__all__ = ["clip", "install", "optim", "precision", "state_dicts"]
