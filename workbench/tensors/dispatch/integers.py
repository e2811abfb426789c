"""Sizes, dims and counts that are 0-dim tensors become Python's integers, as torch's own argument parser reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

_DTYPES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_INTEGERS = {"int", "Optional[int]"}
_TENSORS = {"Tensor", "Optional[Tensor]"}
_LISTS = {"List[int]", "Optional[List[int]]"}

_ALWAYS = {"__getitem__": {1}, "narrow": {2}}
"""Positions at which functions take 0-dim tensors too, and read them as integers."""


def with_integers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The arguments with 0-dim tensors read where torch takes integers, or a number by name alone; None where there are
    none.

    A value of a global tensor is read on all ranks.
    """
    places, names, numbers = _integer_parameters(getattr(func, "__name__", ""))
    read_args = tuple(
        read_integers(value) if at in places or (at and -1 in places) else value for at, value in enumerate(args)
    )
    read_kwargs = {name: read_integers(value) if name in names else value for name, value in kwargs.items()}
    read_kwargs |= {name: _number(kwargs[name]) for name in numbers & kwargs.keys()}
    is_same = all(a is b for a, b in zip(args, read_args, strict=True))
    if is_same and all(kwargs[name] is value for name, value in read_kwargs.items()):
        return None
    return read_args, read_kwargs


def read_integers(value: Any) -> Any:
    """A 0-dim tensor of integers as a number, also in tuples, lists and slices; anything else unchanged.

    A value of a global tensor is read on all ranks.
    """
    if isinstance(value, (tuple, list)):
        read = [read_integers(item) for item in value]
        return value if all(a is b for a, b in zip(value, read, strict=True)) else type(value)(read)
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return slice(*map(read_integers, bounds)) if any(isinstance(bound, torch.Tensor) for bound in bounds) else value
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in _DTYPES:
        return int(value)
    return value


def _number(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor) and value.dim() == 0
    return value.detach().item() if is_tensor else value


@lru_cache(maxsize=4096)
def _integer_parameters(name: str) -> tuple[frozenset[int], frozenset[str], frozenset[str]]:
    """Positions and names at which an operator takes integers; -1 for all behind a list that may be written out. Then
    names of numbers (``alpha``, ``beta``, ``value``).

    A 0-dim tensor stays a tensor where the operator takes tensors too (``x + n``, ``torch.max(x, n)``). Operators on
    Python's numbers alone (``add(int, int)``) say nothing.
    """
    places: set[int] = set()
    names: set[str] = set()
    numbers: set[str] = set()
    tensors: set[int | str] = set()
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        kinds = [str(argument.real_type) for argument in schema.arguments]
        for position, (argument, kind) in enumerate(zip(schema.arguments, kinds, strict=True)):
            if kind in _TENSORS and not argument.kwarg_only:
                tensors |= {position, argument.name}
            if kind == "number" and argument.kwarg_only and "Tensor" in kinds:
                numbers.add(argument.name)
            if position and kind in _INTEGERS | _LISTS and "Tensor" in kinds:
                places.add(position)
                names.add(argument.name)
                if position == 1 and kind in _LISTS:
                    places.add(-1)
    return frozenset(places - tensors | _ALWAYS.get(name, set())), frozenset(names - tensors), frozenset(numbers)
