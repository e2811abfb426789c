"""What a captured step says where calls cannot be replayed, or a replay does less than the step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from workbench.errors import CaptureWarning


def _warn(text: str) -> None:
    """Warn at the line that calls the captured step."""
    warnings.warn(f"capture: {text}", CaptureWarning, stacklevel=4)


def warn_of_inputs(name: str, leaves: Sequence[Any], which: str) -> None:
    """The step ``name`` has too many kinds of inputs; ``which`` says what is wrong with these."""
    shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    _warn(
        f"{name} was called with {shapes}, which is {which}. Such calls run as they are. Every shape, layout and value "
        "that is no tensor is a recording of its own. Pad batches to one shape, and hand numbers in as tensors."
    )


def warn_of_changes(name: str, num_calls: int) -> None:
    """Before each of the last ``num_calls`` calls the modules had other parts."""
    _warn(
        f"{name} has not been replayed, since before each of {num_calls} calls its modules had got other layers, "
        "parameters or buffers. Such calls run as they are. Write to the tensors that are there: "
        "module.buffer.copy_(...)."
    )


def warn_of_numbers(name: str, changed: Sequence[str]) -> None:
    """The step changes numbers of modules and objects, or draws random ones; ``changed`` has a text for each."""
    _warn(
        f"{name} changes numbers that are in no tensor: {', '.join(changed)}. A replay neither changes, reads nor "
        "draws them: they stay those of the recording. Do that outside of the step, or keep them in tensors."
    )


def warn_of_values(name: str, changed: Sequence[str], max_recordings: int) -> None:
    """Numbers that the step reads have had too many values; ``changed`` has a text for each."""
    _warn(
        f"{name} reads numbers that change between calls: {', '.join(changed)}. Every value is a "
        f"recording of its own, and there are {max_recordings} already (max_recordings={max_recordings}). Such calls "
        "run as they are. Keep the number in a tensor that the step reads, and write to it: module.tau.fill_(0.5)."
    )
