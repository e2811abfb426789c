"""What a program can reach, step by step: attributes, contents of lists, what the code of functions names."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from workbench.tensors.global_tensor import GlobalTensor

OF_TORCH = frozenset(nn.Module().__dict__)
"""Attributes that every module has."""
_HOOKS = tuple(sorted(name for name in OF_TORCH if name.startswith(("_forward_", "_backward_"))))
"""Those in which it has its hooks. A forward may add some, and note that it has: ``transformers`` do."""
OF_ALL_MODULES: tuple[dict[int, Any], ...] = (
    _global_forward_pre_hooks, _global_forward_hooks, _global_backward_pre_hooks, _global_backward_hooks,
)  # fmt: skip
"""Hooks of all modules, by number: ``register_module_forward_hook`` and its like."""
HOLDERS = (list, dict, set, deque)
PLAIN_VALUES = frozenset({bool, int, float, str, bytes, type(None)})
_OTHERS_CODE = frozenset({"builtins", "torch", "numpy", "workbench"})
_WITHOUT_STATE = _OTHERS_CODE | sys.stdlib_module_names
"""Packages whose functions, classes and modules keep nothing of the program."""


def is_of_others(kind: type) -> bool:
    """Whether a class is Python's own, torch's, numpy's or of this package."""
    return kind.__module__.partition(".")[0] in _OTHERS_CODE


@dataclass(frozen=True, eq=False)
class Variables:
    """Some variables of a module (by its dict) or of a class."""

    owner: dict[str, Any] | type
    names: frozenset[str]

    def read(self) -> dict[str, Any]:
        """The values of those that are set."""
        present = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return {name: present[name] for name in self.names if name in present}

    def write(self, values: Mapping[str, Any]) -> None:
        """Give them these values, and unset the others."""
        present = self.read()
        for name in present.keys() - values.keys():
            if isinstance(self.owner, dict):
                del self.owner[name]
            else:
                delattr(self.owner, name)
        for name, value in values.items():
            if name in present and present[name] is value:
                continue
            if isinstance(self.owner, dict):
                self.owner[name] = value
            else:
                setattr(self.owner, name, value)


def contents_of_cell(cell: CellType) -> tuple[Any, ...]:
    """The value of a variable of an enclosing function; nothing where it has none."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def fill_cell(cell: CellType, contents: tuple[Any, ...]) -> None:
    """Give it what ``contents_of_cell`` has returned."""
    if contents:
        cell.cell_contents = contents[0]
    elif contents_of_cell(cell):
        del cell.cell_contents


def reached_from(value: Any, with_code: bool) -> Iterable[Any] | None:
    """What a value has or names directly; None where it may change and nobody can look into it, as an iterator.

    Args:
        with_code: also what the code of functions and of classes names: their variables, and those around them.
    """
    if isinstance(value, nn.Module):
        found = _of_module(value)
    elif isinstance(value, (*HOLDERS, tuple, frozenset)):
        found = [*value, *dict.values(value)] if isinstance(value, dict) else list(value)
        if hasattr(value, "__dict__"):  # attributes beside its contents
            found.append(value.__dict__)
    elif isinstance(value, CellType):
        return contents_of_cell(value)
    elif isinstance(value, Variables):
        return value.read().values()
    elif isinstance(value, (FunctionType, *_BOUND, partial, ModuleType, type, *_DESCRIPTORS)):
        return _of_code(value) if with_code else ()
    elif isinstance(value, torch.Tensor):
        return ()
    elif is_of_others(type(value)) and type(value).__module__ != "builtins":
        return None if hasattr(value, "__next__") else ()
    elif hasattr(value, "__dict__"):
        found = list(value.__dict__.values())
    else:
        return () if _is_value(type(value)) else None  # type: ignore[arg-type]
    return [*found, type(value)] if with_code else found


_NO_VARIABLES = ("__", "_abc_")
"""How names begin that Python gives to every class."""
_DESCRIPTORS = (staticmethod, classmethod, property)
_BOUND_IN_C = (BuiltinMethodType, MethodWrapperType)
_BOUND = (MethodType, *_BOUND_IN_C)


@lru_cache(maxsize=1024)
def _is_value(kind: Any) -> bool:
    """Whether objects of a class are equal by what they hold, and so hold the same for ever, as ranges and paths."""
    return kind.__hash__ is not None and kind.__eq__ is not object.__eq__


def _of_module(module: nn.Module) -> list[Any]:
    found = [value for name, value in module.__dict__.items() if name not in OF_TORCH]
    if not any(isinstance(buffer, GlobalTensor) for buffer in module._buffers.values()):
        found.append(module._buffers)
    return [*found, *(module.__dict__[name] for name in _HOOKS), *module._modules.values()]


def _of_code(value: Any) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, _BOUND_IN_C):
        return [value.__self__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, ModuleType) or not _may_have_state(value.__module__):
        return []
    if isinstance(value, type):
        own = {n: v for n, v in vars(value).items() if not n.startswith(_NO_VARIABLES) or isinstance(v, FunctionType)}
        return [Variables(value, frozenset(own)), *value.__bases__]
    names = names_in(value.__code__)
    named = Variables(value.__globals__, names)
    modules = [each for each in named.read().values() if isinstance(each, ModuleType)]
    inside = [Variables(each.__dict__, names) for each in modules if _may_have_state(each.__name__)]
    defaults = (value.__defaults__, value.__kwdefaults__)
    return [named, *inside, *(value.__closure__ or ()), *defaults, value.__dict__]


def _may_have_state(module_name: Any) -> bool:
    return isinstance(module_name, str) and module_name.partition(".")[0] not in _WITHOUT_STATE


def names_in(code: CodeType) -> frozenset[str]:
    """Names of variables and attributes in a function's code, and in that of functions inside it."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)
