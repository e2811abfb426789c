"""Keys under which plans and inferred results are kept: everything of a call that they depend on, but no values."""

from __future__ import annotations

from typing import Any

import torch

from workbench.tensors.global_tensor import GlobalTensor, local_torch

PLAIN = object()
"""In a key, represents a tensor that is not global; no plan has such a key."""
PARAMETER = object()
"""In a key, follows the spec of a parameter, which may not be boxed as others are."""


def dtype_of(tensor: GlobalTensor) -> torch.dtype:
    """Part of the key of a tensor that lies as terms: of bools, a sum is their "or"."""
    with local_torch():
        return tensor.dtype


def key_of(value: Any) -> Any:
    """The part of a key that an argument gives."""
    kind = type(value)
    if kind is GlobalTensor:
        spec = value._spec
        return (spec, value._is_param, dtype_of(value)) if spec.has_partial else (spec, value._is_param)
    if kind is int or kind is str:
        return value
    if kind is bool or kind is float:
        return (repr(value),)  # to a dictionary True, 1 and 1.0 are one key, and nan equals nothing
    if isinstance(value, (list, tuple)):
        return (kind, *map(key_of, value))
    if isinstance(value, slice):
        return ("slice", key_of(value.start), key_of(value.stop), key_of(value.step))
    if isinstance(value, dict):
        return tuple((name, key_of(item)) for name, item in value.items())
    if isinstance(value, torch.Tensor):
        return PLAIN
    return value
