"""Functions of torch that are replaced while this process is in a world: one table, each entry with its reason.

Joining a world (``wb.init``, or a simulated rank) installs them. Leaving the last one (``wb.shutdown``) puts torch's
own back. Each replacement does for plain tensors what torch does.

A name that a module of the program has imported before (``from torch import tensor``) becomes the replacement, too, and
then torch's own again. Other references stay torch's own: default arguments, closures, attributes, entries of lists.
Where torch looks up a later step at each call, an entry replaces that step, and all references are right.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinMethodType, ModuleType
from typing import Any

from torch.jit import _builtins

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One replaced attribute, or one hook.

    Attributes:
        place: its address, ``"torch.optim.Optimizer.zero_grad"``; for a hook, the function that registers it.
        why: what goes wrong for global tensors without it.
        replacement: from torch's own to what takes its place; for a hook, what registers it and returns its handle.
    """

    place: str
    why: str
    replacement: Callable[..., Any]
    is_hook: bool = False


PATCHES: list[Patch] = []
_undo: dict[int, Callable[[], None]] = {}
_imported: list[tuple[dict[str, Any], str, Any, Any]] = []
"""Names in a program's modules: namespace, name, torch's own, and its replacement."""
_looked_for: set[int | str] = set()
"""What modules have been searched for, as the keys of ``_Replaced``."""
_looked_at: set[str] = set()
"""The modules that have been searched: thousands of them take a tenth of a second, which is too long for each world."""
_importing: dict[str, set[str]] = {}
"""By module, its names that mean something replaced."""
_KEEP_NAMES = {"torch", "workbench", *sys.stdlib_module_names} - {"__main__"}
"""Packages whose modules mean torch's own, or import none of it."""
_num_worlds = 0
_lock = threading.RLock()


def patch(place: str, why: str, replacement: Callable[[Any], Any]) -> None:
    """Add an entry. Its module may be loaded later, see ``install_loaded``."""
    _add(Patch(place, why, replacement))


def hook(place: str, why: str, register: Callable[[], Any]) -> None:
    """Add a hook that torch calls for every optimizer or module; hooks run in the order of the table."""
    _add(Patch(place, why, register, is_hook=True))


def _add(entry: Patch) -> None:
    with _lock:
        PATCHES.append(entry)
        if _num_worlds:
            install_loaded()


def install() -> None:
    """Count one more world; the first one installs all."""
    global _num_worlds
    with _lock:
        _num_worlds += 1
        install_loaded()


def remove() -> None:
    """Count one world less; the last one puts torch's own back."""
    global _num_worlds
    with _lock:
        _num_worlds -= 1
        while not _num_worlds and _undo:
            _undo.popitem()[1]()
        while not _num_worlds and _imported:
            namespace, name, torchs_own, replacement = _imported.pop()
            if namespace.get(name) is replacement:
                namespace[name] = torchs_own


@contextmanager
def installed() -> Iterator[None]:
    """Context in which all are installed."""
    install()
    try:
        yield
    finally:
        remove()


def install_loaded() -> None:
    """Install the entries whose modules have been loaded since."""
    with _lock:
        replaced = _Replaced()
        for index, entry in enumerate(PATCHES):
            if index not in _undo and (undo := _apply(entry, replaced)) is not None:
                _undo[index] = undo
        if replaced.functions:
            _replace_imported(replaced)


class _Replaced:
    """What has been replaced: functions (torch's own, replacement) by ``id``, and classes by the name of a method of C.

    A method of C that is bound to a class, as ``Function.apply`` is since torch 2.14, looks up nothing at a call.
    """

    def __init__(self) -> None:
        self.functions: dict[int, tuple[Any, Any]] = {}
        self.classes: dict[str, type] = {}

    def now(self, value: Any) -> Any:
        """The replacement of a value, or the value."""
        if id(value) in self.functions:
            return self.functions[id(value)][1]
        if type(value) is BuiltinMethodType and value.__name__ in self.classes and isinstance(value.__self__, type):
            cls = value.__self__
            return getattr(cls, value.__name__) if issubclass(cls, self.classes[value.__name__]) else value
        return value

    def are_in(self, values: list[Any]) -> bool:
        """A quick look; False if ``now`` gives every value back."""
        has_methods = bool(self.classes) and BuiltinMethodType in set(map(type, values))
        return has_methods or not self.functions.keys().isdisjoint(map(id, values))


def _replace_imported(replaced: _Replaced) -> None:
    _look_at_modules(replaced)
    for module_name, names in _importing.items():
        namespace = vars(sys.modules[module_name]) if module_name in sys.modules else {}
        for name in names & namespace.keys():
            if (now := replaced.now(value := namespace[name])) is not value:
                namespace[name] = now
                _imported.append((namespace, name, value, now))


def _look_at_modules(replaced: _Replaced) -> None:
    """Find the modules with names of something replaced: in ``__main__`` each time, in others when they are new."""
    wanted: set[int | str] = {*replaced.functions, *replaced.classes}
    if not wanted <= _looked_for:
        _looked_for.update(wanted)
        _looked_at.clear()
    for module_name in [*(sys.modules.keys() - _looked_at), "__main__"]:
        module = sys.modules.get(module_name)
        _looked_at.add(module_name)
        if module_name.partition(".")[0] in _KEEP_NAMES or not isinstance(module, ModuleType):
            continue
        namespace = dict(vars(module))
        if replaced.are_in(list(namespace.values())):
            found = {name for name, value in namespace.items() if replaced.now(value) is not value}
            _importing.setdefault(module_name, set()).update(found)


def _apply(entry: Patch, replaced: _Replaced) -> Callable[[], None] | None:
    if entry.is_hook:
        undo: Callable[[], None] = entry.replacement().remove
        return undo
    owner, name = _find_owner(entry.place)
    if owner is None:
        return None
    before, torchs_own = vars(owner).get(name, _ABSENT), getattr(owner, name, None)
    replacement = entry.replacement(torchs_own)
    setattr(owner, name, replacement)
    if torchs_own is not None and getattr(replacement, "__wrapped__", None) is torchs_own:
        _name_by_place(replacement, owner, name)
    forget_operator = _script_as(torchs_own, replacement)
    if callable(torchs_own) and callable(replacement):
        replaced.functions[id(torchs_own)] = torchs_own, replacement
    elif type(torchs_own) is BuiltinMethodType and before is not _ABSENT:
        replaced.classes[name] = owner

    def undo_patch() -> None:
        delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)
        forget_operator()

    return undo_patch


def _name_by_place(replacement: Any, owner: Any, name: str) -> None:
    """Give a replacement the address at which pickle finds it: here the replacement, elsewhere torch's own."""
    is_module = isinstance(owner, ModuleType)
    replacement.__module__ = owner.__name__ if is_module else owner.__module__
    replacement.__qualname__ = name if is_module else f"{owner.__qualname__}.{name}"


def _script_as(torchs_own: Any, replacement: Any) -> Callable[[], object]:
    """Let TorchScript compile a replacement to the operator of torch's own; the result undoes it."""
    operators: dict[int, str] = _builtins._get_builtin_table()
    operator = operators.get(id(torchs_own))
    if operator is None:
        return lambda: None
    operators[id(replacement)] = operator
    return lambda: operators.pop(id(replacement), None)


def _find_owner(place: str) -> tuple[Any, str]:
    """The module, class or function that has the attribute; None where its module is not loaded."""
    *path, name = place.split(".")
    lengths = range(len(path), 0, -1)
    loaded = next((length for length in lengths if ".".join(path[:length]) in sys.modules), 0)
    owner: Any = sys.modules.get(".".join(path[:loaded]))
    for part in path[loaded:]:  # a module may load another one where it is asked for its name
        owner = vars(owner).get(part) if isinstance(owner, ModuleType) else getattr(owner, part, None)
    return owner, name
