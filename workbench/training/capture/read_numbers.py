"""The numbers that a step reads from its modules: a recording holds for their values only."""

from __future__ import annotations

import math
import reprlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, repeat
from operator import is_
from typing import Any, TypeAlias

from torch import nn

from workbench.training.pipelining.forward_cache import VALUES
from workbench.training.program_state import OF_TORCH
from workbench.training.strategies.fused_experts import PASSING

_MOST_ENTRIES = 64
"""Of a list, tuple or dict that is compared."""
_ABSENT = object()
_NEVER_NUMBERS = OF_TORCH | vars(nn.Module).keys() | {"__class__"}
_HELD = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, tuple, dict)
_READ = VALUES + _CONTAINERS

Key: TypeAlias = tuple[int, str]
"""The id of a module and the name of an attribute."""
Reads: TypeAlias = dict[Key, tuple[nn.Module, Any]]
"""The module, and its value when it was first read, as ``frozen`` gives it."""

_LOCK = threading.Lock()
_READERS: dict[int, Reads] = {}
"""By the thread that records: simulated ranks are threads."""


@contextmanager
def read_numbers() -> Iterator[Reads]:
    """Context that gives the numbers, strings, flags, and lists, tuples and dicts of them (of up to 64 entries) that
    this thread reads from attributes of modules in it. What code takes from ``module.__dict__`` is not noticed.
    """
    thread, reads = threading.get_ident(), Reads()
    with _LOCK:
        _READERS[thread] = reads
        setattr(nn.Module, "__getattribute__", _recording_reads)  # noqa: B010 (mypy refuses the assignment)
    try:
        yield reads
    finally:
        with _LOCK:
            del _READERS[thread]
            if not _READERS:
                del nn.Module.__getattribute__


def _recording_reads(module: nn.Module, name: str) -> Any:
    """``nn.Module.__getattribute__`` while a step is recorded."""
    inherited = super(nn.Module, module).__getattribute__
    reads = _READERS.get(threading.get_ident())
    if reads is None or name in _NEVER_NUMBERS or PASSING in inherited("__dict__"):
        return inherited(name)
    try:
        value = inherited(name)
    except AttributeError:  # a number may come here later: getattr(self, "scale", 1.0)
        attributes = inherited("__dict__")
        if not any(name in attributes.get(held, ()) for held in _HELD):
            reads.setdefault((id(module), name), (module, None))
        raise
    if isinstance(value, _READ) and (id(module), name) not in reads:
        own = inherited("__dict__").get(name, _ABSENT)
        found = frozen(own)
        if found is not None or own is _ABSENT:  # one of the class may get one of its own later
            reads[id(module), name] = module, found
    return value


def frozen(value: Any) -> Any:
    """A value to compare with later ones of the attribute: equal if it has the same type and value, NaN included. None
    for what is not compared: tensors and other objects, and lists, tuples and dicts that are long or have such in them.
    """
    if isinstance(value, VALUES):
        return type(value), value if value == value else math.nan
    if not isinstance(value, _CONTAINERS) or len(value) > _MOST_ENTRIES:
        return None
    entries = list(chain.from_iterable(value.items()) if isinstance(value, dict) else value)
    return (type(value), [*map(frozen, entries)]) if all(isinstance(entry, VALUES) for entry in entries) else None


def change_of(module: nn.Module, name: str, before: Any, now: Any) -> str:
    """A text for a warning; ``before`` and ``now`` are frozen."""
    return f"{type(module).__name__}.{name} ({_text(before)}, then {_text(now)})"


def _text(value: Any) -> str:
    if value is None:
        return "none that is compared"
    kind, content = value
    if not issubclass(kind, _CONTAINERS):
        return repr(content)
    entries = [entry for _, entry in content]
    if issubclass(kind, dict):
        return reprlib.repr(dict(zip(entries[::2], entries[1::2], strict=True)))
    return reprlib.repr(tuple(entries) if issubclass(kind, tuple) else entries)


def numbers_of(modules: Iterable[nn.Module]) -> dict[Key, Any]:
    """The present numbers that programs have set on modules, frozen."""
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
            if start is not None and now is not None:
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
