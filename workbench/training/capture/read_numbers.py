"""The numbers that a step reads from its modules: a recording holds for their values only."""

from __future__ import annotations

import math
import reprlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, repeat
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.tensors.program_state import is_object
from workbench.tensors.reached_objects import OF_TORCH, contents_of_cell, names_in
from workbench.training.pipelining.forward_cache import VALUES
from workbench.training.strategies.fused_experts import PASSING

_MOST_ENTRIES = 64
"""Of a list, tuple or dict that is compared."""
_ABSENT = object()
_NEVER_NUMBERS = (OF_TORCH | vars(nn.Module).keys() | {"__class__"}) - {"forward"}
_HELD = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, tuple, dict)
_COMPARED_AS_ONE = (torch.Tensor, FunctionType, BuiltinFunctionType, MethodType)

Key: TypeAlias = tuple[int, str]
"""The id of a module, or of an object that a module has, and the name of an attribute."""
Reads: TypeAlias = dict[Key, tuple[Any, Any]]
"""The module or object, and its value when it was first read, as ``frozen`` gives it."""


class _Same:
    """In the place of a type: of what is compared by its identity."""


_LOCK = threading.Lock()
_READERS: dict[int, tuple[dict[Key, tuple[Callable[[], Any], Any]], frozenset[int]]] = {}
"""By the thread that records (simulated ranks are threads): what it has read, and the ids of the objects."""
_CHANGED: set[type] = set()
"""Classes whose reads are noted while a thread records."""


def objects_of(modules: Iterable[nn.Module], others: Iterable[Any] = ()) -> list[Any]:
    """The objects of the program, such as a configuration, that modules have, that are among ``others``, or that these
    have. Not optimizers, which replays call.
    """
    found: dict[int, Any] = {}
    waiting: list[Any] = [value for m in modules for name, value in m.__dict__.items() if name not in OF_TORCH]
    waiting += others
    while waiting:
        value = waiting.pop()
        if id(value) not in found and not isinstance(value, (*VALUES, Optimizer)) and is_object(value):
            found[id(value)] = value
            waiting += value.__dict__.values()
    return list(found.values())


def named_by(step: Any) -> list[Any]:
    """What a step, or a hook, has beside its arguments: the object of a method, the arguments of a partial, and of
    variables around a function and of its module those that its code names.
    """
    if isinstance(step, partial):
        return [*named_by(step.func), *step.args, *step.keywords.values()]
    if isinstance(step, MethodType):
        return [*named_by(step.__func__), step.__self__]
    decorated = getattr(step, "__wrapped__", None)
    found = [] if decorated is None else named_by(decorated)
    if not isinstance(step, FunctionType):
        return [*found, step]
    variables = [step.__globals__[name] for name in names_in(step.__code__) if name in step.__globals__]
    return [*found, *variables, *chain.from_iterable(map(contents_of_cell, step.__closure__ or ()))]


@contextmanager
def read_numbers(objects: Iterable[Any] = ()) -> Iterator[Reads]:
    """Context that gives what this thread reads in it from attributes of modules and of ``objects``: numbers, strings,
    flags, lists, tuples and dicts of them (of up to 64 entries), and which tensors, functions and objects are there.
    What code takes from ``module.__dict__`` is not noticed, and nothing of an object whose class has a
    ``__getattribute__``, or of a module that is gone at the end: the step has made it, with what it has.
    """
    thread, objects = threading.get_ident(), list(objects)
    reads, found = Reads(), dict[Key, tuple[Callable[[], Any], Any]]()
    with _LOCK:
        kinds = {nn.Module, *(kind for kind in map(type, objects) if "__getattribute__" not in vars(kind))} - _CHANGED
        _READERS[thread] = found, frozenset(map(id, objects))
        for kind in kinds:
            with suppress(TypeError):  # a class that is written in C, such as functools.partial, stays as it is
                setattr(kind, "__getattribute__", _recording_reads(kind))  # noqa: B010 (mypy refuses the assignment)
                _CHANGED.add(kind)
    try:
        yield reads
    finally:
        with _LOCK:
            del _READERS[thread]
            while not _READERS and _CHANGED:
                del _CHANGED.pop().__getattribute__
        reads |= {key: (of, first) for key, (held, first) in found.items() if (of := held()) is not None}


def _recording_reads(kind: Any) -> Any:
    """The ``__getattribute__`` of a class while a step is recorded."""
    hold: Any = weakref.ref if kind is nn.Module else (lambda of: lambda: of)
    never = _NEVER_NUMBERS if kind is nn.Module else {"__class__", "__dict__"}

    def read(of: Any, name: str) -> Any:
        inherited = super(kind, of).__getattribute__
        reads, objects = _READERS.get(threading.get_ident(), (None, ()))
        if reads is None or name in never or not (kind is nn.Module or id(of) in objects):
            return inherited(name)
        attributes = inherited("__dict__")
        if PASSING in attributes:
            return inherited(name)
        try:
            value = inherited(name)
        except AttributeError:  # a number may come here later: getattr(self, "scale", 1.0)
            if not any(name in attributes.get(held, ()) for held in _HELD):
                reads.setdefault((id(of), name), (hold(of), None))
            raise
        if (id(of), name) not in reads and frozen(value) is not None:
            own = attributes.get(name, _ABSENT)
            found = frozen(own)
            if found is not None or own is _ABSENT:  # one of the class may get one of its own later
                reads[id(of), name] = hold(of), found
        return value

    return read


def frozen(value: Any) -> Any:
    """A value to compare with later ones of the attribute: equal if it has the same type and value, NaN included, or is
    the same tensor, function or object of the program. None for what is not compared: modules, and lists, tuples and
    dicts that are long or have anything but numbers, strings and flags in them.
    """
    if isinstance(value, VALUES):
        return type(value), value if value == value else math.nan
    if not isinstance(value, _CONTAINERS):
        return (_Same, id(value)) if isinstance(value, _COMPARED_AS_ONE) or is_object(value) else None
    if len(value) > _MOST_ENTRIES:
        return None
    entries = list(chain.from_iterable(value.items()) if isinstance(value, dict) else value)
    return (type(value), [*map(frozen, entries)]) if all(isinstance(entry, VALUES) for entry in entries) else None


def is_number(found: Any) -> bool:
    """Whether a frozen value is one of numbers, strings and flags, and no tensor, function or object."""
    return found is not None and found[0] is not _Same


def change_of(module: Any, name: str, before: Any, now: Any) -> str:
    """A text for a warning; ``before`` and ``now`` are frozen."""
    return f"{type(module).__name__}.{name} ({_text(before)}, then {_text(now)})"


def _text(value: Any) -> str:
    if value is None:
        return "none that is compared"
    kind, content = value
    if kind is _Same:
        return f"object {content:#x}"
    if not issubclass(kind, _CONTAINERS):
        return repr(content)
    entries = [entry for _, entry in content]
    if issubclass(kind, dict):
        return reprlib.repr(dict(zip(entries[::2], entries[1::2], strict=True)))
    return reprlib.repr(tuple(entries) if issubclass(kind, tuple) else entries)


def numbers_of(modules: Iterable[Any]) -> dict[Key, Any]:
    """What programs have set on modules and objects now, frozen."""
    return {
        (id(module), name): value
        for module in modules
        for name, attribute in module.__dict__.items()
        if name not in OF_TORCH and (value := frozen(attribute)) is not None
    }


class Numbers:
    """The numbers that a recording has read, as they were when the step began."""

    def __init__(self) -> None:
        self._start: Reads = {}
        self._same: list[Any] = []
        self._look()

    def add(self, reads: Reads, before: Mapping[Key, Any]) -> list[str]:
        """Add what a recording has read, but for numbers that the step itself has changed: a replay leaves them as
        they are. ``before`` has those from before the step. Returns a text for each that has changed.
        """
        changed = []
        for key, (module, first) in reads.items():
            start, now = before.get(key, first), frozen(module.__dict__.get(key[1], _ABSENT))
            if start == now:
                self._start.setdefault(key, (module, start))
                continue
            self._start.pop(key, None)
            if is_number(start) and is_number(now):
                changed.append(change_of(module, key[1], start, now))
        self._look()
        return changed

    def hold(self) -> bool:
        """Whether all numbers have the values that they had."""
        if not all(map(is_, self._found(), self._same)):
            found = list(self._found())
            if [*map(frozen, found)] != self._frozen:
                return False
            self._same = [now if kept else _ABSENT for now, kept in zip(found, self._frozen, strict=True)]
        return all(frozen(attributes.get(name)) == kept for attributes, name, kept in self._contents)

    def changes(self) -> list[str]:
        """The numbers that have another value now, a text for each."""
        return [
            change_of(module, name, kept, now)
            for (_, name), (module, kept) in self._start.items()
            if (now := frozen(module.__dict__.get(name, _ABSENT))) != kept
        ]

    def _found(self) -> Iterator[Any]:
        return map(dict.get, self._places, self._names, repeat(_ABSENT))

    def _look(self) -> None:
        """Look where the numbers are. The same object needs no comparison by value, unless it is a list or a dict."""
        self._places: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._frozen: list[Any] = []
        self._contents: list[tuple[dict[str, Any], str, Any]] = []
        for (_, name), (module, kept) in self._start.items():
            if kept and issubclass(kept[0], list | dict):
                self._contents.append((module.__dict__, name, kept))
            else:
                self._places.append(module.__dict__)
                self._names.append(name)
                self._frozen.append(kept)
        self._same = [_ABSENT] * len(self._frozen)
