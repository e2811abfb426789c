"""Functions of torch and attributes of plain tensors that take a global tensor's whole value, on all ranks.

They would read this rank's shard without asking. What they make or hold stays plain. The value keeps its history, so a
gradient goes through, as through ``full_tensor``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from workbench.tensors.captured_tensors import with_plain_captures
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.patch_table import patch

MAKERS = (
    *(f"torch.sparse_{kind}_tensor" for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
    *(f"torch.nested.{name}" for name in ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow")),
    *("torch.to_dlpack", "torch.utils.dlpack.to_dlpack"),
)
"""Functions that make a tensor of another kind from tensors."""
SETTERS = ("data", "grad", "real", "imag")
"""Attributes to which a tensor can be assigned."""


def whole_values(values: Any) -> Any:
    """``values`` with the logical value in place of each global tensor, at any depth; all ranks call it."""
    return tree_map_only(GlobalTensor, GlobalTensor.full_tensor, values)


def _taking_whole(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torchs_own)
    def make(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_enabled():
            args, kwargs = whole_values((args, kwargs))
        return torchs_own(*args, **kwargs)

    return make


def _reading_whole(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torchs_own)
    def create_mask(mod_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return torchs_own(with_plain_captures(mod_fn, whole_values), *args, **kwargs)

    return create_mask


class _Attribute(property):
    """An attribute of tensors whose methods, where torch looks them up to ask subclasses and modes, are torch's own."""


def _set_whole(torchs_own: Any) -> property:
    def assign(tensor: torch.Tensor, value: Any) -> None:
        if torch._C._is_torch_function_enabled():
            if isinstance(tensor, GlobalTensor):  # real or imag: it has its own data and grad
                getattr(tensor, torchs_own.__name__).copy_(value)
                return
            if isinstance(value, GlobalTensor):
                value = value.full_tensor()
        torchs_own.__set__(tensor, value)

    made = _Attribute(torchs_own.__get__, assign, torchs_own.__delete__, torchs_own.__doc__)
    vars(made).update({name: getattr(torchs_own, name) for name in ("__get__", "__set__", "__delete__")})
    return made


for place in MAKERS:
    patch(place, "it would make a plain tensor of this rank's shard as if it were the whole", _taking_whole)
patch(
    "torch.nn.attention.flex_attention.create_mask",
    "the function of a mask, which torch calls under vmap, would read global tensors there; so for create_block_mask",
    _reading_whole,
)
for name in SETTERS:
    patch(f"torch.Tensor.{name}", "it would take this rank's shard for a whole tensor", _set_whole)
