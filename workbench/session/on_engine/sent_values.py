"""Values of one rank that another rank gets: whether they have changed, how they travel, how they are shown."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.session import pickling, protocol
from workbench.tensors.agreement import is_identical
from workbench.tensors.global_tensor import GlobalTensor, plain
from workbench.training.saving.parts import kind_of

_SHOWN_CHARACTERS = 20


def kind(value: Any) -> str:
    """``"global tensor"``, or as in checkpoints ``"module"``, ``"optimizer"``, ``"stateful"`` or ``"value"``."""
    if isinstance(value, GlobalTensor):
        return "global tensor"
    try:
        return "value" if isinstance(value, type) else kind_of(value)
    except Exception:  # noqa: BLE001 - an object's own __getattr__ may raise anything
        return "value"


def spread(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables. An object that holds modules, optimizers or their like is replaced by its attributes, under names
    such as ``trainer.model``.
    """
    found = {}
    for name, value in variables.items():
        attributes = {} if isinstance(value, type | ModuleType | FunctionType) else getattr(value, "__dict__", {})
        if kind(value) == "value" and any(kind(each) != "value" for each in attributes.values()):
            found.update({f"{name}.{attribute}": each for attribute, each in attributes.items()})
        else:
            found[name] = value
    return found


def with_own_state(names: Collection[str], variables: Mapping[str, Any]) -> list[str]:
    """Those of the names whose value is an optimizer, or a module with tensors, and belongs to nothing else: no other
    variable's module, list or dict has it in it, and no variable of another name is the same.
    """
    elsewhere = set[int]()
    for name, value in variables.items():
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else ()
        inner = value.modules() if isinstance(value, nn.Module) else value if isinstance(value, list | tuple) else inner
        elsewhere |= {id(each) for each in inner if each is not value} | ({id(value)} if name not in names else set())
    alone = {name: variables[name] for name in names if id(variables[name]) not in elsewhere}
    return [name for name, value in alone.items() if kind(value) == "optimizer" or _has_tensors(value)]


def _has_tensors(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(True for _ in chain(value.parameters(), value.buffers()))


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal; no exchange, and no function of the user's classes runs."""
    try:
        return _is_same(one, other)
    except Exception:  # noqa: BLE001 - pickling runs anybody's code, and objects may hold each other in circles
        return False


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, type) and isinstance(other, type):
        return one.__qualname__ == other.__qualname__
    if type(one) is not type(other) or kind(one) not in ("value", "global tensor"):
        return False
    if isinstance(one, torch.Tensor):
        return _is_same_tensor(one, other)
    if isinstance(one, FunctionType):
        return one.__code__ == other.__code__
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if getattr(one, "__dict__", None):
        return _is_same(vars(one), vars(other))
    return _pickled(one) == _pickled(other)


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    specs = [(each._spec.layout, each._spec.shape) for each in (one, other) if isinstance(each, GlobalTensor)]
    one, other = plain(one.detach()), plain(other.detach())
    return (one.device, specs[:1]) == (other.device, specs[1:]) and is_identical(one, other)


def renewed(value: Any, namespace: Mapping[str, Any]) -> Any:
    """The value after set-up cells have made classes anew, and modules were imported anew: a module, class or function
    of a module as it is now, or the object with its new class. So for objects in it.
    """
    if isinstance(value, ModuleType):
        return sys.modules.get(object.__getattribute__(value, "__dict__").get("__name__", ""), value)
    if isinstance(value, type | FunctionType):
        return value if value.__module__ == "__main__" else _now(value, namespace)
    waiting, seen = [value], set()
    while waiting:
        one = waiting.pop()
        old = type(one)
        new = _now(old, namespace)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if new is not old:
            with contextlib.suppress(TypeError):  # its layout has changed
                one.__class__ = new
        if isinstance(one, list | tuple | set | dict) and kind(one) == "value":
            waiting += one.values() if isinstance(one, dict) else one
        if (new is not old or old.__module__ == "__main__") and kind(one) == "value":
            waiting += getattr(one, "__dict__", {}).values()
    return value


def _now(old: Any, namespace: Mapping[str, Any]) -> Any:
    """The class or function that has taken the place of this one; itself if none has."""
    names = namespace if old.__module__ == "__main__" else getattr(sys.modules.get(old.__module__), "__dict__", {})
    new: Any = names.get(old.__name__)
    is_other = type(new) is type(old) and (new.__module__, new.__qualname__) == (old.__module__, old.__qualname__)
    return new if is_other else old


class _Function(NamedTuple):
    """A function of a cell, without the variables of all cells, which pickles of functions have in them."""

    code: CodeType
    name: str
    defaults: Any
    keyword_defaults: Any


def pack(value: Any, namespace: Mapping[str, Any]) -> bytes | str:
    """The pickle of a value, or the reason why it cannot travel."""
    if isinstance(value, type) and value.__module__ == "__main__":
        return "a class"
    try:
        if isinstance(value, FunctionType) and (value.__module__ == "__main__" or value.__globals__ is namespace):
            if value.__closure__ is not None:
                return "a function with a closure"
            value = _Function(value.__code__, value.__name__, value.__defaults__, value.__kwdefaults__)
        return _pickled(value)
    except Exception as error:  # noqa: BLE001 - pickling runs anybody's code
        return f"it cannot be pickled ({error})"


class _Pickler(pickling.Pickler):
    """Takes no global tensors, and no modules and optimizers, which other variables name too. Takes classes of cells by
    their names: another rank has its own from its set-up cells.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, GlobalTensor):
            raise TypeError("it holds a global tensor, which one rank cannot rebuild alone: keep x.full_tensor() in it")
        if isinstance(obj, nn.Module | Optimizer | nn.Parameter):
            what = "an optimizer" if isinstance(obj, Optimizer) else "a module or parameter"
            raise TypeError(f"it holds {what}: {type(obj).__name__}")
        name = obj.__qualname__ if isinstance(obj, type) and obj.__module__ == "__main__" else ""
        if name and getattr(sys.modules["__main__"], name, None) is obj:
            return name
        return super().reducer_override(obj)


def _pickled(value: Any) -> bytes:
    buffer = protocol.LimitedBuffer(protocol.MAX_VALUE_BYTES)
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def unpack(data: bytes, namespace: dict[str, Any]) -> Any:
    """The value of the bytes of ``pack``; functions of cells use this rank's variables."""
    value = pickle.loads(data)
    if not isinstance(value, _Function):
        return value
    function = FunctionType(value.code, namespace, value.name, value.defaults)
    function.__kwdefaults__ = value.keyword_defaults
    return function


def shown(name: str, value: Any) -> str:
    """The variable's name, with its value if that is short: ``step = 12``."""
    is_plain = isinstance(value, int | float | str) and len(repr(value)) <= _SHOWN_CHARACTERS
    return f"{name} = {value!r}" if is_plain else name
