"""Older spellings: they work, and warn with the present spelling. Importing this module gives global tensors theirs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from workbench.core.placement import Placement
from workbench.errors import LayoutError
from workbench.tensors import install  # noqa: F401 - installs the patches of torch
from workbench.tensors.global_tensor import GlobalTensor


def warn_old_spelling(old: str, new: str) -> None:
    """Warn at the line of the program that ``old`` is now written ``new``."""
    warnings.warn(f"{old} is the older spelling. Write {new}.", DeprecationWarning, stacklevel=3)


def missing_layout(function: str, shape: Sequence[int], placement: Any, sbp: Any) -> LayoutError:
    """The error of a call that makes a global tensor without a placement or sbp."""
    missing = [name for name, value in (("placement", placement), ("sbp", sbp)) if value is None]
    return LayoutError(
        f"{function} of shape {tuple(shape)}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. "
        "A global tensor needs both: placement= names the ranks, sbp= says how it lies on them. Write e.g. "
        'placement=flow.placement("cpu", ranks=[0, 1]), sbp=flow.sbp.split(0).'
    )


def to_consistent(made: Any, placement: Placement | None = None, sbp: Any = None) -> Any:
    """The older spelling of ``to_global``: a method of tensors and modules."""
    warn_old_spelling("to_consistent(placement, sbp)", "to_global(placement=placement, sbp=sbp)")
    return made.to_global(placement, sbp)


GlobalTensor.to_consistent = to_consistent  # type: ignore[attr-defined]
GlobalTensor.is_global, GlobalTensor.is_local = True, False  # type: ignore[attr-defined]
