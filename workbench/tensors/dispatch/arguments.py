"""Arguments of a call in one form, however it is written: rules, plans and composites see keywords at their positions,
and sizes, dims and counts that are 0-dim tensors as Python's integers, as torch's own argument parser reads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""Other names that torch's own argument parser takes."""
Order = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
"""Which keywords move to positions, and which stay, under torch's names and as they are given."""
_orders: dict[Any, Order | None] = {}


def order_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Order | None:
    """How the keywords of such a call move; None for a call that stays unchanged."""
    key = (func, len(args), *kwargs)
    try:
        return _orders[key]
    except KeyError:
        moved, kept = _order(parameters_of(func), len(args), list(kwargs))
        is_in_order = not moved and kept == tuple((name, name) for name in kwargs)
        order = _orders[key] = None if is_in_order else (moved, kept)
        return order


def move_keywords(order: Order, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The call that an order makes of a call."""
    moved, kept = order
    args = (*args, *[kwargs[name] for name in moved])
    return args, {name: kwargs[given] for name, given in kept} if kept else {}


def in_order(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The same call with keyword arguments moved to their positions up to the first that is missing; the others follow
    in torch's order.

    >>> in_order(torch.gather, ("x",), {"index": "i", "dim": 1})
    (('x', 1, 'i'), {})
    """
    order = order_of(func, args, kwargs) if kwargs else None
    return (args, kwargs) if order is None else move_keywords(order, args, kwargs)


def by_name(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a Python function, each under its name; without the defaults.

    >>> by_name(torch.autograd.grad, ("y", "x"), {"create_graph": True})
    {'outputs': 'y', 'inputs': 'x', 'create_graph': True}
    """
    return {**dict(zip(_names_of(func), args, strict=False)), **kwargs}


@lru_cache(maxsize=4096)
def _names_of(func: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(func).parameters)


Parameters = tuple[tuple[str, bool, bool], ...]
"""Of one overload: name, whether it can stand at its position, whether it must be given."""


@lru_cache(maxsize=4096)
def parameters_of(func: Callable[..., Any]) -> tuple[Parameters, ...]:
    """The parameters of each overload of a torch function; none where torch does not say."""
    if isinstance(func, torch._ops.OpOverload):
        return (_of_schema(func._schema),)
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature, but their operators may have schemas
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(func, '__name__', '')}")
        return tuple(map(_of_schema, schemas))
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return ()
    return (tuple((p.name, p.kind is p.POSITIONAL_OR_KEYWORD, p.default is p.empty) for p in parameters),)


def _of_schema(schema: Any) -> Parameters:
    """Python calls ``self`` of a function ``input``, and functions that make tensors take ``requires_grad`` too."""
    found = [
        ("input" if a.name == "self" else a.name, not a.kwarg_only, not a.has_default_value()) for a in schema.arguments
    ]
    is_factory = any(name == "pin_memory" for name, _, _ in found)
    return (*found, ("requires_grad", False, False)) if is_factory else tuple(found)


def _order(overloads: tuple[Parameters, ...], num_given: int, names: list[str]) -> Order:
    """Which keywords move to positions, and which stay under which names."""
    known = {name for overload in overloads for name, _, _ in overload}
    given = {name if name in known else _NUMPY_NAMES.get(name, name): name for name in names}
    fitting = [overload for overload in overloads if _fits(overload, num_given, given)]
    if not fitting:
        return (), tuple((name, name) for name in names)
    moved = []
    for position in range(num_given, len(names) + num_given):
        at = {overload[position][:2] if position < len(overload) else ("", False) for overload in fitting}
        name, can_stand = at.pop()
        if at or not can_stand or name not in given or name == "inplace":
            break
        moved.append(name)
    listed = [name for name, _, _ in fitting[0] if name in given and name not in moved]
    return tuple(given[name] for name in moved), tuple((name, given[name]) for name in listed)


def _fits(overload: Parameters, num_given: int, given: dict[str, str]) -> bool:
    names = {name for name, _, _ in overload[num_given:]}
    required = {name for name, _, must in overload[num_given:] if must}
    return required <= given.keys() <= names


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
