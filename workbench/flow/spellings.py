"""Older spellings: they work, and say how one writes it now."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from workbench.errors import LayoutError


def warn_old(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn at the line of the program that ``old`` is now written ``new``."""
    warnings.warn(f"{old} is the older spelling. Write {new}.", DeprecationWarning, stacklevel=stacklevel)


def missing_layout(function: str, shape: Sequence[int], missing: Sequence[str]) -> LayoutError:
    """The error of a call that makes a global tensor and does not say where, or how, it lies."""
    return LayoutError(
        f"{function} of shape {tuple(shape)}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. "
        "A global tensor needs both: placement= names the ranks, sbp= says how it lies on them. Write e.g. "
        'placement=flow.placement("cpu", ranks=[0, 1]), sbp=flow.sbp.split(0).'
    )
