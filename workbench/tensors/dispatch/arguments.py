"""Arguments of a call in one form, however it is written: rules, plans and composites see keywords at their positions,
and numbers (sizes, dims, counts, factors) that are 0-dim tensors or integers of numpy as Python's, as torch's argument
parser reads them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence, Set
from functools import lru_cache
from typing import Any

import numpy as np
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


_NUMBERS_OF_ROWS = {torch.int8, torch.int16, torch.int32, torch.int64}
_DTYPES = {torch.uint8, *_NUMBERS_OF_ROWS}
_INTEGERS = {"int", "Optional[int]"}
_NUMBERS = {"number", "Optional[number]", "float", "Optional[float]"}
_LISTS = {"List[int]", "Optional[List[int]]"}


def takes_numbers(func: Callable[..., Any]) -> bool:
    """Whether torch takes numbers in a call of the function, for which ``with_numbers`` would look."""
    return bool(_readers(getattr(func, "__name__", "")))


def with_numbers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The arguments with 0-dim tensors read where torch takes integers or other numbers; None where there are none.

    A value of a global tensor is read on all ranks.
    """
    readers = _readers(getattr(func, "__name__", ""))
    if not readers:
        return None
    behind = readers.get(-1)
    read_args = tuple(
        [
            value if (read := readers.get(at, behind if at else None)) is None else read(value)
            for at, value in enumerate(args)
        ]
    )
    read_kwargs = {name: readers[name](value) if name in readers else value for name, value in kwargs.items()}
    if all(map(operator.is_, args, read_args)) and all(map(operator.is_, kwargs.values(), read_kwargs.values())):
        return None
    return read_args, read_kwargs


def read_integers(value: Any, dtypes: Set[torch.dtype] = _DTYPES) -> Any:
    """A 0-dim tensor of integers (of ``dtypes``) or an integer of numpy as Python's, also in tuples, lists and slices,
    where tensors are of any integers; anything else unchanged.

    A value of a global tensor is read on all ranks.
    """
    if isinstance(value, (tuple, list)):
        read = [read_integers(item) for item in value]
        return value if all(a is b for a, b in zip(value, read, strict=True)) else type(value)(read)
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        is_read = any(isinstance(bound, (torch.Tensor, np.integer)) for bound in bounds)
        return slice(*map(read_integers, bounds)) if is_read else value
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in dtypes:
        return int(value)
    return int(value) if isinstance(value, np.integer) else value


def read_index(index: Any) -> Any:
    """An index with 0-dim tensors of integers as numbers, but for bytes, which are masks; as a tuple where torch takes
    it as one: a sequence of fewer than 32 items, with a tensor, a sequence, a slice, None or ``...`` in it.
    """
    if type(index) is not tuple and isinstance(index, Sequence) and len(index) < 32 and any(map(_makes_tuple, index)):
        index = tuple(index)
    if isinstance(index, tuple):
        read = tuple([read_integers(item, _NUMBERS_OF_ROWS) for item in index])
        return index if all(map(operator.is_, index, read)) else read
    return read_integers(index, _NUMBERS_OF_ROWS)


def _makes_tuple(item: Any) -> bool:
    return item is None or item is Ellipsis or isinstance(item, slice) or hasattr(item, "__len__")


def _number(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.dim() == 0 and not value.requires_grad
    return value.item() if is_number else value


_ALWAYS: dict[str, tuple[int | str, Callable[[Any], Any]]] = {
    "__getitem__": (1, read_index), "__setitem__": (1, read_index), "narrow": (2, read_integers)
}  # fmt: skip
"""Positions at which functions take 0-dim tensors too, and what reads them."""


@lru_cache(maxsize=4096)
def _readers(name: str) -> dict[int | str, Callable[[Any], Any]]:
    """Positions and names at which an operator takes integers, or other numbers (``alpha``, the order of a norm), with
    what reads these; -1 for all positions behind a list that may be written out.

    A 0-dim tensor stays a tensor where the operator takes tensors too (``x + n``, ``torch.max(x, n)``). Operators on
    Python's numbers alone (``add(int, int)``) say nothing.
    """
    readers: dict[int | str, Callable[[Any], Any]] = {}
    tensors: set[int | str] = set()
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        kinds = [str(argument.real_type) for argument in schema.arguments]
        if not any("Tensor" in kind for kind in kinds):
            continue
        for position, (argument, kind) in enumerate(zip(schema.arguments, kinds, strict=True)):
            places: set[int | str] = {argument.name} if argument.kwarg_only else {position, argument.name}
            if "Tensor" in kind:
                tensors |= places
            elif position and kind in _INTEGERS | _LISTS | _NUMBERS:
                readers |= dict.fromkeys(places, _number if kind in _NUMBERS else read_integers)
                if position == 1 and kind in _LISTS:
                    readers[-1] = read_integers
    readers = {place: read for place, read in readers.items() if place not in tensors}
    return readers | dict([_ALWAYS[name]] if name in _ALWAYS else [])
