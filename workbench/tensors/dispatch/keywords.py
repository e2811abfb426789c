"""Keyword arguments at their positions: rules, plans and composites see one form of a call, however it is written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""Other names that torch's own argument parser takes."""
_Order = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
_orders: dict[Any, _Order | None] = {}
"""Which keywords move to positions, and which stay under which names; None for a call that stays unchanged."""


def in_order(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The same call with keyword arguments moved to their positions up to the first that is missing; the others follow
    in torch's order.

    >>> in_order(torch.gather, ("x",), {"index": "i", "dim": 1})
    (('x', 1, 'i'), {})
    """
    key = (func, len(args), *kwargs)
    try:
        order = _orders[key]
    except KeyError:
        moved, kept = _order(parameters_of(func), len(args), list(kwargs))
        is_in_order = not moved and kept == tuple((name, name) for name in kwargs)
        order = _orders[key] = None if is_in_order else (moved, kept)
    if order is None:
        return args, kwargs
    moved, kept = order
    args = (*args, *[kwargs[name] for name in moved])
    return args, {name: kwargs[given] for name, given in kept} if kept else {}


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
    """Python calls ``self`` of a function ``input``."""
    return tuple(
        ("input" if a.name == "self" else a.name, not a.kwarg_only, not a.has_default_value()) for a in schema.arguments
    )


def _order(overloads: tuple[Parameters, ...], num_given: int, names: list[str]) -> _Order:
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


__all__ = ["in_order", "parameters_of"]
