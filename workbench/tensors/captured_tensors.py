"""Functions that read global tensors around them, as functions of plain ones.

A function that torch calls inside a transform (``torch.vmap``), such as one that modifies the scores of attention, has
tensors as variables: of a function around it, of its module, of an object. A transform drops layouts, so a copy of the
function is called, whose variables are plain.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.reached_objects import PLAIN_VALUES, contents_of_cell, is_of_others, names_in

Replace = Callable[[torch.Tensor], torch.Tensor]
_TENSORS_OF_MODULES = ("_parameters", "_buffers")


def with_plain_captures(function: Any, replace: Replace) -> Any:
    """``function``, or a copy of it that reads ``replace(tensor)`` where it reads a global tensor, or a plain one that
    takes a gradient.

    What its code names is searched: closures, default arguments, variables of its module, attributes of objects; and
    so is what the functions among these name. Each tensor is replaced once.
    """
    return _Copies(replace, frozenset(_names(function, set()))).of(function)


def _names(value: Any, seen: set[int]) -> Iterator[str]:
    """The names in the code of a function, and of those that it calls."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (MethodType, partial)):
        yield from _names(value.__func__ if isinstance(value, MethodType) else value.func, seen)
    elif isinstance(value, property):
        yield from _names(value.fget, seen)
    elif isinstance(value, FunctionType) and not is_of_others(value):  # type: ignore[arg-type]
        names = names_in(value.__code__)
        yield from names
        around = [content for cell in value.__closure__ or () for content in contents_of_cell(cell)]
        around += [value.__globals__[name] for name in names if name in value.__globals__]
        for each in around:
            yield from _names(each, seen)
            for name in names:
                yield from _names(getattr(type(each), name, None), seen)


class _Copies:
    """Copies of what holds a tensor that is replaced, as far as ``names`` reach; everything else stays itself."""

    def __init__(self, replace: Replace, names: frozenset[str]) -> None:
        self._replace, self._names = replace, names
        self._found: dict[int, tuple[Any, Any]] = {}
        """By id: a value, which so stays alive, and its copy."""

    def of(self, value: Any) -> Any:
        """The copy, or the value itself."""
        if type(value) in PLAIN_VALUES:
            return value
        if id(value) not in self._found:
            self._found[id(value)] = value, value  # where it holds itself
            self._found[id(value)] = value, self._copied(value)
        return self._found[id(value)][1]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._replace(value) if isinstance(value, GlobalTensor) or value.requires_grad else value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            function, owner = self.of(value.__func__), self.of(value.__self__)
            is_same = function is value.__func__ and owner is value.__self__
            return value if is_same else MethodType(function, owner)
        if isinstance(value, partial):
            parts = value.func, value.args, value.keywords
            function, args, keywords = copies = tuple(map(self.of, parts))
            return value if _are_same(copies, parts) else partial(function, *args, **keywords)
        if type(value) is dict:
            entries = {key: self.of(each) for key, each in value.items()}
            return value if _are_same(entries.values(), value.values()) else entries
        if type(value) in (list, tuple):
            copies = type(value)(map(self.of, value))
            return value if _are_same(copies, value) else copies
        is_object = hasattr(value, "__dict__") and not isinstance(value, type)
        return self._object(value) if isinstance(value, nn.Module) or (is_object and _is_users(value)) else value

    def _function(self, function: FunctionType) -> FunctionType:
        if not _is_users(function):
            return function
        named = {n: function.__globals__[n] for n in names_in(function.__code__) if n in function.__globals__}
        cells = function.__closure__ or ()
        around = [contents_of_cell(cell) for cell in cells], function.__defaults__, function.__kwdefaults__, named
        contents, defaults, keywords, variables = copies = tuple(map(self.of, around))
        if _are_same(copies, around):
            return function
        made = FunctionType(
            function.__code__,
            function.__globals__ if variables is named else {**function.__globals__, **variables},
            function.__name__,
            defaults,
            tuple(CellType(*content) for content in contents) or None,
        )
        made.__kwdefaults__ = keywords
        return made

    def _object(self, value: Any) -> Any:
        """A shallow copy with other attributes, of those that are named."""
        held = [value.__dict__, *(value.__dict__.get(kind, {}) for kind in (*_TENSORS_OF_MODULES, "_modules"))]
        named = {name: each for attributes in held for name, each in attributes.items() if name in self._names}
        copies = {name: self.of(each) for name, each in named.items()}
        if _are_same(copies.values(), named.values()):
            return value
        made = copy.copy(value)
        for kind in _TENSORS_OF_MODULES:  # these would have to be parameters; as attributes they need not
            if kind in made.__dict__:
                made.__dict__[kind] = {n: t for n, t in made.__dict__[kind].items() if n not in copies}
        made.__dict__.update(copies)
        return made


def _is_users(value: Any) -> bool:
    """Whether it is code of the user's, or an object of a class of theirs."""
    return not is_of_others(value if isinstance(value, FunctionType) else type(value))  # type: ignore[arg-type]


def _are_same(copies: Any, values: Any) -> bool:
    return all(made is value for made, value in zip(copies, values, strict=True))
