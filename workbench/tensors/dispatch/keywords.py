"""Keyword arguments at their positions: rules, plans and composites see one form of a call, however it is written."""

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
