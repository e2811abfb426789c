"""Data of the examples: ``flow.data.load_mnist(BATCH_SIZE)``."""

from __future__ import annotations

from workbench.flow.mnist_util import load_data as load_mnist

__all__ = ["load_mnist"]
