"""Modules of the user's in requests: engines run the version of a module that the notebook has loaded.

Functions and classes of a module travel by name. An engine that imported the module before its file was edited would
run the old code, and a new engine the new one. So a request has the versions of the modules that it uses with it, if
they are the user's: outside of Python and of installed packages. An engine that has an older version imports the module
again, and the modules that have names of it. Objects that the engine has already made stay as they are.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import importlib
import inspect
import io
import os
import pickle
import sys
import sysconfig
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from workbench.errors import SessionError
from workbench.session import pickling

_LENGTH_BYTES = 8
_NOT_THE_USERS = {"__main__", "workbench"}
"""Top names of modules that are no files of the user's, wherever they are."""
_PACKAGED = {"site-packages", "dist-packages"}
_OF_PYTHON = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


class Version(NamedTuple):
    """A module as a process has loaded it. It is parsed where a request uses it."""

    file: str
    package: str  #: from which its relative imports count
    time_s: float  #: when the file was written
    content: bytes

    @property
    def digest(self) -> str:
        """Of the file's code; comments are no part of it."""
        return _parsed(self.content, self.package)[0]

    @property
    def imports(self) -> set[str]:
        """At its top or in functions: modules, and names that may be modules."""
        return _parsed(self.content, self.package)[1]

    def has_code_of(self, other: Version) -> bool:
        """Whether both are the same code."""
        return self.content == other.content or self.digest == other.digest


class Announced(NamedTuple):
    """The version of a module, in a request."""

    file: str
    digest: str
    time_s: float


_loaded: dict[str, tuple[Any, Version | None]] = {}
"""By name: the module's spec, which each load replaces, and its version; None where it is no file of the user's."""
_found: dict[str, Version] = {}
"""Versions of the files from which modules are loaded now or were loaded last, by name."""


class _Recorder:
    """A finder of modules that finds none: it reads the version of a file before it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        with suppress(Exception):  # whatever it is, the finders behind this one report it better
            may_be_users = path is None or any(map(is_users, path))
            if may_be_users and (version := _version_of(name, PathFinder.find_spec(name, path, target))):
                _found[name] = version


def watch() -> None:
    """Record the versions of the user's modules from now on; safe to call twice."""
    if _Recorder not in sys.meta_path:
        sys.meta_path.insert(0, _Recorder)
    loaded()


def loaded() -> dict[str, Version]:
    """The versions of the user's modules that this process has loaded, or ``%autoreload`` has changed in place."""
    try:
        reloader = sys.modules["IPython"].get_ipython().magics_manager.registry["AutoreloadMagics"]._reloader
        handled_s, failed = dict(reloader.modules_mtimes), set(reloader.failed)
    except Exception:  # noqa: BLE001 - no notebook, no autoreload, or one that keeps other records
        handled_s, failed = {}, set()
    found = {}
    for name, module in list(sys.modules.items()):
        spec = _names_in(module).get("__spec__")
        if name not in _loaded or _loaded[name][0] is not spec:
            version, before = _version_of(name, spec), _found.get(name)
            _loaded[name] = (spec, before if version and before and before.file == version.file else version)
        if known := _loaded[name][1]:
            is_other = handled_s.get(name, known.time_s) != known.time_s and known.file not in failed
            if is_other and (now := _version_of(name, spec)) and now.time_s == handled_s[name]:
                _loaded[name] = (spec, known := now)
            found[name] = known
    return found


def pack(value: object) -> bytes:
    """The pickle of a value, and behind it the versions of the user's modules that it may use, and where these are."""
    buffer = io.BytesIO()
    pickler = _RecordingPickler(buffer)
    pickler.dump(value)
    here = loaded()
    used, new = set(), pickler.modules & here.keys()
    while new:
        used |= new
        new = {of for name in new for of in (*_used_by(name), *here[name].imports) if of in here} - used
    versions = {name: here[name] for name in sorted(used)}
    announced = {name: Announced(each.file, each.digest, each.time_s) for name, each in versions.items()}
    rest = pickle.dumps((announced, _search_path() if announced else []))
    buffer.write(rest + len(rest).to_bytes(_LENGTH_BYTES, "big"))
    return buffer.getvalue()


def pack_variables(variables: Mapping[str, object]) -> bytes:
    """``pack`` of variables; an error names the one that it is about."""
    with pickling.naming(variables, "push"):
        return pack(variables)


def unpack(payload: bytes) -> tuple[Any, list[str]]:
    """The value of the bytes of ``pack``, with the modules' code as the notebook has it, and the names of the modules
    that were imported anew for it.

    Raises:
        SessionError: this process cannot load the version of a module that the notebook has. Errors of unpickling pass.
    """
    length = int.from_bytes(payload[-_LENGTH_BYTES:], "big")
    wanted, search_path = pickle.loads(payload[-_LENGTH_BYTES - length : -_LENGTH_BYTES])
    search(search_path)
    here = loaded() if wanted else {}
    renewed = _import_anew({n for n in here.keys() & wanted.keys() if here[n].digest != wanted[n].digest == _digest(n)})
    value = pickle.loads(payload)  # ends where the pickle does
    for name, own in sorted(loaded().items() if wanted else ()):
        if name in wanted and own.digest != (theirs := wanted[name]).digest:
            raise SessionError(
                f"module {name}: the notebook and this engine have loaded different versions. The notebook has "
                f"{theirs.file} of {_clock(theirs)}, the engine {own.file} of {_clock(own)}. Both must run the same "
                f"code. Load the present file in the notebook (importlib.reload, %autoreload 2, or a new kernel), and "
                f"run this again. If the engine's file is the older one, copy the file to its host."
            )
    return value, renewed


def _search_path() -> list[str]:
    """Where this process looks for modules; without the working folder if that is removed."""
    try:
        return [os.path.abspath(path) for path in sys.path]
    except FileNotFoundError:
        return [path for path in sys.path if os.path.isabs(path)]


def search(path: Sequence[str]) -> None:
    """Look for modules in these folders, too: those of the notebook's search path."""
    sys.path.extend(each for each in path if each not in sys.path)


def import_edited_anew() -> None:
    """Import modules again whose files have changed since they were loaded."""
    now = {name: (version, _version_of(name, _loaded[name][0])) for name, version in loaded().items()}
    _import_anew({name for name, (old, new) in now.items() if new is not None and not new.has_code_of(old)})


def outdated(value: object) -> str:
    """The file of which a function, a class or an object has the code from before it was loaded again; empty if the
    module has the same code now.
    """
    made: Any = value if isinstance(value, type | FunctionType) else type(value)
    version, now = loaded().get(made.__module__), sys.modules.get(made.__module__)
    for part in made.__qualname__.split("."):
        now = getattr(now, part, made)
    return version.file if version is not None and _code_of(now) != _code_of(made) else ""


def _code_of(made: Any) -> dict[str, Any]:
    """The code of a function, or of the methods of a class: ``%autoreload`` gives old objects the new one."""
    functions = vars(made).items() if isinstance(made, type) else [("", made)]
    found = {name: inspect.unwrap(each) for name, each in functions if isinstance(each, FunctionType)}
    return {name: getattr(each, "__code__", None) for name, each in found.items()}


class _RecordingPickler(pickling.Pickler):
    """Collects the names of the modules of functions and classes, and of those that functions import."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType | ModuleType):
            self.modules.add(_module_of(obj))
        if isinstance(obj, FunctionType):
            self.modules.update(_imports_of(obj.__code__))
        return super().reducer_override(obj)


def _import_anew(edited: Collection[str]) -> list[str]:
    """Import modules again, and those that have names of them, in their first order; returns their names.

    A package does not count as a user of its own parts: it stays, and gets the new part in the place of the old one.
    """
    here, found, size = loaded() if edited else (), set(edited), 0
    while len(found) > size:
        size = len(found)
        found |= {name for name in here if found & _used_by(name, with_parts=False)}
    old = {name: sys.modules.pop(name) for name in list(sys.modules) if name in found}
    for name, module in old.items():
        parent, _, part = name.rpartition(".")
        if (names := _names_in(sys.modules.get(parent))).get(part) is module:
            del names[part]
    importlib.invalidate_caches()
    for name in old:
        with suppress(Exception):  # where the request needs it, its own import fails too
            importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        parent, _, part = name.rpartition(".")
        if parent in found:
            _names_in(sys.modules.get(parent)).setdefault(part, module)  # the parts that have stayed
    return list(old)


def _used_by(name: str, with_parts: bool = True) -> set[str]:
    """The modules whose names, functions, classes or objects a module has among its own names."""
    return {
        _module_of(value)
        for own, value in list(_names_in(sys.modules.get(name)).items())
        if with_parts or _names_in(value).get("__name__") != f"{name}.{own}"
    }


def _names_in(module: object) -> dict[str, Any]:
    """A module's own names. Modules that are loaded at their first use stay unloaded."""
    with suppress(Exception):
        return object.__getattribute__(module, "__dict__")
    return {}


def _module_of(value: Any) -> str:
    with suppress(Exception):  # objects may answer in any way
        name = _names_in(value).get("__name__") if isinstance(value, ModuleType) else value.__module__
        return name if isinstance(name, str) else ""
    return ""


def _imports_of(code: CodeType) -> set[str]:
    """What a function imports, as `Version.imports`."""
    found, module = set(), ""
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME":
            found.add(module := each.argval)
        elif each.opname == "IMPORT_FROM":
            found.add(f"{module}.{each.argval}")
    return found.union(*(_imports_of(const) for const in code.co_consts if isinstance(const, CodeType)))


def is_users(path: str) -> bool:
    """Whether a file is neither Python's nor of an installed package. One installed to be changed is the user's."""
    return not _PACKAGED & set(Path(path).parts) and not path.startswith(_OF_PYTHON)


def _version_of(name: str, spec: Any) -> Version | None:
    """The version of a Python file of the user's as it is now; None for any other, and where it cannot be found."""
    try:
        file = spec.origin
        if name.partition(".")[0] in _NOT_THE_USERS or not file.endswith(".py") or not is_users(file):
            return None
        package = name if Path(file).stem == "__init__" else name.rpartition(".")[0]
        return Version(file, package, Path(file).stat().st_mtime, Path(file).read_bytes())
    except Exception:  # noqa: BLE001 - specs of modules are anybody's objects
        return None


@cache
def _parsed(content: bytes, package: str) -> tuple[str, set[str]]:
    """The digest of a file's code, and what it imports."""
    imports = set()
    with suppress(Exception), warnings.catch_warnings():  # what does not parse is known by its bytes
        warnings.simplefilter("ignore")
        tree = ast.parse(content)
        content = ast.dump(tree).encode()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imports |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = resolve_name("." * node.level + (node.module or ""), package)
                imports |= {module, *(f"{module}.{each.name}" for each in node.names)}
    return hashlib.sha256(content).hexdigest(), imports


def _digest(name: str) -> str:
    """Of the code in a module's file as it is now; empty if there is none."""
    return getattr(_version_of(name, _loaded[name][0]), "digest", "")


def _clock(version: Version | Announced) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version.time_s))
