"""The sbp of a variable on the devices of its scope: ``model_distribute=flow.distribute.split(axis=0)``."""

from __future__ import annotations

from workbench.core import sbp
from workbench.core.sbp import Split, broadcast

__all__ = ["auto", "broadcast", "split"]


def split(axis: int) -> Split:
    """Every device holds a slice of dim ``axis``.

    A dense layer keeps its weight as (out, in), so ``split(0)`` cuts the columns of the matrix that inputs are
    multiplied by.

    >>> split(axis=0)
    S(0)
    """
    return sbp.split(axis)


def auto() -> None:
    """The layer's own choice: the whole variable on every device."""
