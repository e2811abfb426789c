"""Modules of the user's in requests: engines run the version of a module that the notebook has loaded.

Functions and classes of a module travel by name. An engine that imported the module before its file was edited would
run the old code, and a new engine the new one. So a request has the versions of the user's modules with it, which are
those outside of Python and of installed packages. An engine that has an older version imports the module again, and
the modules that use it. Objects that the engine has already made stay as they are.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import pickle
import sys
import sysconfig
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from workbench.errors import SessionError
from workbench.session.pickling import Pickler

_LENGTH_BYTES = 8
_OF_CLASSES = {"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__doc__", "__static_attributes__"}
_NOT_THE_USERS = {"__main__", "workbench"}
"""Top names of modules that are no files of the user's, wherever they are."""
_PACKAGED = {"site-packages", "dist-packages"}
_OF_PYTHON = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


class Version(NamedTuple):
    """A module as a process has loaded it."""

    file: str
    digest: str  #: of the file's content
    time_s: float  #: when the file was written


_loaded: dict[str, tuple[Any, Version | None]] = {}
"""By name: the module's spec, which each load of it replaces, and its version; None for modules of packages."""
_found: dict[str, Version] = {}
"""Versions of the files from which modules are loaded now or were loaded last, by name."""


_contents: dict[str, tuple[Any, Any]] = {}
"""By name: the module's spec, and its content when it was last equal to its file."""


class _Recorder:
    """A finder of modules that finds none: it reads the version of a file before it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        with suppress(Exception):  # whatever it is, the finders behind this one report it better
            if path is None or any(map(_is_users, path)):
                spec = PathFinder.find_spec(name, path, target)
                version = _version_of(spec.origin) if spec is not None else None
                if version is not None:
                    _found[name] = version


def watch() -> None:
    """Record the versions of the user's modules from now on; safe to call twice."""
    if not any(finder is _Recorder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Recorder)
    loaded()


def loaded() -> dict[str, Version]:
    """The versions of all modules of the user's that this process has loaded, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__dict__", {}).get("__spec__")
        if name not in _loaded or _loaded[name][0] is not spec:
            file = getattr(spec, "origin", None)
            version = _version_of(file) if name.partition(".")[0] not in _NOT_THE_USERS else None
            before = _found.get(name)
            is_same_file = version is not None and before is not None and before.file == version.file
            _loaded[name] = (spec, before if is_same_file else version)
        if (known := _loaded[name][1]) is not None:
            found[name] = known
    return found


def loaded_in_notebook() -> dict[str, Version]:
    """As `loaded`. ``%autoreload`` may also change a module in its place, without a new load: a module whose content
    has changed, and its file too, has the code of the file. So has one that is seen for the first time.
    """
    found = loaded()
    for name, version in found.items():
        spec, content = _loaded[name][0], _content_of(sys.modules.get(name))
        known_spec, known_content = _contents.get(name, (None, None))
        if _mtime_of(version) != version.time_s:
            if known_spec is spec and known_content == content:
                continue  # edited, and not loaded
            found[name] = _version_of(version.file) or version
            _loaded[name] = spec, found[name]
        _contents[name] = spec, content
    return found


def pack(value: object) -> bytes:
    """The pickle of a value, and behind it the versions of the modules that it may use."""
    buffer = io.BytesIO()
    pickler = _RecordingPickler(buffer)
    pickler.dump(value)
    versions = loaded_in_notebook()
    rest = pickle.dumps((versions, sorted(pickler.modules & versions.keys())))
    buffer.write(rest + len(rest).to_bytes(_LENGTH_BYTES, "big"))
    return buffer.getvalue()


def unpack(payload: bytes) -> Any:
    """The value of the bytes of ``pack``, with the modules' code as the notebook has it.

    Raises:
        SessionError: this process cannot load the version of a module that the notebook has. Errors of unpickling pass.
    """
    length = int.from_bytes(payload[-_LENGTH_BYTES:], "big")
    wanted, used = pickle.loads(payload[-_LENGTH_BYTES - length : -_LENGTH_BYTES])
    here = loaded()
    other = {name for name in here.keys() & wanted.keys() if here[name].digest != wanted[name].digest}
    _forget({name for name in other if _digest_now(here[name]) == wanted[name].digest})
    value = pickle.loads(payload)  # ends where the pickle does
    _check(wanted, used)
    return value


def forget_edited() -> None:
    """Let modules whose files have changed since they were loaded be imported anew."""
    _forget({name for name, version in loaded().items() if _digest_now(version) not in ("", version.digest)})


class _RecordingPickler(Pickler):
    """Collects the names of the modules of functions and classes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType | ModuleType):
            self.modules.add(_module_of(obj))
        return super().reducer_override(obj)


def _check(wanted: Mapping[str, Version], used: Iterable[str]) -> None:
    """Whether this process has the notebook's versions of the modules, and of the others that these use."""
    here = loaded()
    for name in sorted(_with_used(used, here)):
        if name in wanted and name in here and here[name].digest != wanted[name].digest:
            theirs, own = wanted[name], here[name]
            raise SessionError(
                f"module {name}: the notebook and this engine have loaded different versions. The notebook has "
                f"{theirs.file} of {_clock(theirs)}, the engine {own.file} of {_clock(own)}. Both must run the same "
                f"code. Load the present file in the notebook (importlib.reload, or restart its kernel; %autoreload 2 "
                f"does it before each cell), and run this again. If the engine's file is the older one, copy the file "
                f"to its host."
            )


def _forget(names: Collection[str]) -> None:
    """Remove modules, the modules that use them, and the parts of these packages; the next import loads them anew."""
    if not names:
        return
    here = loaded()
    found, size = set(names), 0
    while len(found) > size:
        size = len(found)
        found |= {name for name in here if _names_in(name) & found or any(name.startswith(f"{of}.") for of in found)}
    for name in found:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def _with_used(names: Iterable[str], among: Collection[str]) -> set[str]:
    """These modules and all that they use."""
    found: set[str] = set()
    new = set(names)
    while new:
        found |= new
        new = {used for name in new for used in _names_in(name) if used in among} - found
    return found


def _names_in(name: str) -> set[str]:
    """The modules whose names, functions, classes or objects a module has among its own names."""
    module = sys.modules.get(name)
    return {_module_of(value) for value in list(getattr(module, "__dict__", {}).values())}


def _module_of(value: object) -> str:
    try:
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    except Exception:  # noqa: BLE001 - objects may answer in any way
        return ""
    return name if isinstance(name, str) else ""


def _content_of(value: Any, owner: str = "") -> Any:
    """What an edit of a module changes: the code of its functions and classes, and its constants."""
    if isinstance(value, ModuleType) and not owner:
        return {
            name: _content_of(one, value.__name__) for name, one in vars(value).items() if not name.startswith("__")
        }
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        return [_content_of(one, owner) for one in (value.fget, value.fset, value.fdel)]
    if isinstance(value, FunctionType):
        defaults = value.__defaults__ or (), tuple((value.__kwdefaults__ or {}).items())
        return value.__code__, _content_of(defaults, f"{owner}:")
    if isinstance(value, type) and value.__module__ == owner:
        return {name: _content_of(one, f"{owner}:") for name, one in vars(value).items() if name not in _OF_CLASSES}
    if type(value) is tuple:
        return [_content_of(one, owner) for one in value]
    return (type(value), value) if type(value) in (bool, int, float, str, bytes) else id(value)


def _mtime_of(version: Version) -> float | None:
    try:
        return Path(version.file).stat().st_mtime
    except OSError:
        return None


def _is_users(path: str) -> bool:
    return not _PACKAGED & set(Path(path).parts) and not path.startswith(_OF_PYTHON)


def _version_of(file: str | None) -> Version | None:
    """The version of a Python file of the user's; None for any other."""
    if not isinstance(file, str) or not file.endswith(".py") or not _is_users(file):
        return None
    try:
        path = Path(file)
        return Version(file, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime)
    except OSError:
        return None


def _digest_now(version: Version) -> str:
    now = _version_of(version.file)
    return now.digest if now is not None else ""


def _clock(version: Version) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version.time_s))
