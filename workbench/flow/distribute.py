"""The sbp of a variable on the devices of its scope: ``model_distribute=flow.distribute.split(axis=0)``."""

from __future__ import annotations

from workbench.core.sbp import Broadcast, Split
from workbench.errors import SbpError

__all__ = ["auto", "broadcast", "split"]


def split(axis: int) -> Split:
    """Every device holds a slice of dim ``axis``.

    A dense layer keeps its weight as (out, in), so ``split(0)`` cuts the columns of the matrix that inputs are
    multiplied by.

    >>> split(axis=0)
    S(0)
    """
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise SbpError(f"distribute.split(axis={axis!r}): the axis is a whole number, e.g. split(axis=0).")
    return Split(axis)


def broadcast() -> Broadcast:
    """Every device holds the whole variable."""
    return Broadcast()


def auto() -> None:
    """The layer's own choice: the whole variable on every device."""
