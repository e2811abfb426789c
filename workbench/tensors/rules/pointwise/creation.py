"""Tensors made after others: ``zeros_like`` and similar functions keep the layout, ``new_zeros`` and similar ones
return B.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from workbench.core.layout import Shape
from workbench.tensors.dispatch.registry import handler
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, new_placeholder, plain, spec_of, wrap


def _constant_like(make: Any) -> Any:
    def creation(func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        spec = spec_of(tensor._spec.world, tensor._spec.layout.without_terms(), tensor._spec.shape)
        dtype, order = kwargs.get("dtype") or tensor.dtype, kwargs.get("memory_format") or torch.preserve_format

        def local() -> torch.Tensor:
            made: torch.Tensor = make(
                plain(tensor), *args[1:], dtype=dtype, device=spec.world.device, memory_format=order
            )
            return made

        return _made(spec, dtype, local, kwargs)

    return creation


def _made(spec: Spec, dtype: torch.dtype, local: Any, kwargs: Any) -> GlobalTensor:
    with local_torch():
        found = new_placeholder(spec.shape, dtype, spec.world.device) if spec.is_placeholder else local()
    result = wrap(found, spec)
    if kwargs.get("requires_grad"):
        result.requires_grad_()
    return result


for _name in ("zeros", "ones", "empty", "full"):
    handler(f"{_name}_like")(_constant_like(getattr(torch, f"{_name}_like")))


def _whole(tensor: GlobalTensor, shape: Shape) -> Spec:
    """B on the tensor's placement, whatever the tensor's layout."""
    return spec_of(tensor._spec.world, tensor._spec.layout.broadcast(), shape)


def _new(make: Any) -> Any:
    def creation(func: Any, args: Any, kwargs: Any) -> Any:
        """``Tensor.new_zeros`` and similar."""
        tensor, given = args[0], list(args[1:])
        given += [kwargs[name] for name in ("size", "stride", "fill_value") if name in kwargs]
        is_listed = isinstance(given[0], (tuple, list))
        shape = tuple(map(operator.index, given[0] if is_listed else given))
        rest = given[1:] if is_listed else ()
        spec, dtype = _whole(tensor, shape), kwargs.get("dtype") or tensor.dtype
        return _made(spec, dtype, lambda: make(shape, *rest, dtype=dtype, device=spec.world.device), kwargs)

    return creation


for _name, _make in (
    ("new_zeros", torch.zeros),
    ("new_ones", torch.ones),
    ("new_empty", torch.empty),
    ("new_full", torch.full),
    ("new_empty_strided", torch.empty_strided),
):
    handler(_name)(_new(_make))


@handler("new")
def new(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.new`` of sizes makes an empty tensor; of a list or a tuple, one of these numbers. torch.distributions
    calls it with a ``torch.Size``.
    """
    tensor, *given = args
    if kwargs or isinstance(given[0] if given else None, torch.Tensor):
        return NotImplemented
    if len(given) == 1 and not isinstance(given[0], (int, torch.Size)):
        return tensor.new_tensor(given[0])
    return tensor.new_empty(*given or (0,))


@handler("new_tensor")
def new_tensor(func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor of numbers that all ranks have."""
    tensor, data = args[0], args[1] if len(args) > 1 else kwargs["data"]
    dtype = kwargs.get("dtype") or tensor.dtype
    values = torch.tensor(data, dtype=dtype, device=tensor._spec.world.device)
    if isinstance(values, GlobalTensor):
        return values.requires_grad_() if kwargs.get("requires_grad") else values
    return _made(_whole(tensor, tuple(values.shape)), dtype, lambda: values, kwargs)
