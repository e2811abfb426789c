"""Tensors made after others: ``zeros_like`` and similar functions keep the layout, ``new_zeros`` and similar ones
return B.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from workbench.tensors.dispatch.registry import handler
from workbench.tensors.global_tensor import new_placeholder, spec_of, wrap
from workbench.tensors.rules.random.sampling import without_partial


def _constant_like(make: Any) -> Any:
    def creation(func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        spec = spec_of(tensor._spec.world, without_partial(tensor), tensor._spec.shape)
        dtype = kwargs.get("dtype") or tensor.dtype
        if spec.is_placeholder:
            local = new_placeholder(spec.shape, dtype, spec.world.device)
        else:
            local = make(spec.local_shape, *args[1:], dtype=dtype, device=spec.world.device)
        result = wrap(local, spec)
        return result.requires_grad_() if kwargs.get("requires_grad") else result

    return creation


for _name, _make in (("zeros", torch.zeros), ("ones", torch.ones), ("empty", torch.empty), ("full", torch.full)):
    handler(f"{_name}_like")(_constant_like(_make))


def _new(make: Any) -> Any:
    def creation(func: Any, args: Any, kwargs: Any) -> Any:
        """``Tensor.new_zeros`` and similar: B on the tensor's placement, whatever the tensor's layout."""
        tensor = args[0]
        is_listed = isinstance(args[1], (tuple, list))
        shape = tuple(map(operator.index, args[1] if is_listed else args[1:]))
        rest = args[2:] if is_listed else ()
        spec = spec_of(tensor._spec.world, tensor._spec.layout.broadcast(), shape)
        dtype = kwargs.get("dtype") or tensor.dtype
        if spec.is_placeholder:
            return wrap(new_placeholder(shape, dtype, spec.world.device), spec)
        return wrap(make(shape, *rest, dtype=dtype, device=spec.world.device), spec)

    return creation


for _name, _make in (
    ("new_zeros", torch.zeros),
    ("new_ones", torch.ones),
    ("new_empty", torch.empty),
    ("new_full", torch.full),
):
    handler(_name)(_new(_make))
