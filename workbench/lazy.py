"""Packages whose names are loaded when they are first used."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any


def lazy_names(
    package: str,
    homes: Mapping[str, Iterable[str]],
    gone: Mapping[str, str] | None = None,
    otherwise: Callable[[str], Any] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a module that loads its names when they are first used.

    Args:
        package: the module's name.
        homes: by module, the names that it has; ``"plan"``, or ``"stages=draw_stages"`` for one that has another name
            there. An empty name stands for the module itself: ``{"workbench.core.sbp": ["sbp="]}``.
        gone: names of earlier versions, each with what to write instead.
        otherwise: finds a public name that is not among these, or raises ``AttributeError``.

    ``dir`` of the module, and with it completion, has these names only.

    >>> find, _, names = lazy_names("shapes", {"math": ["tau", "root=sqrt"]})
    >>> names
    ['root', 'tau']
    """
    where = _places(homes)

    def find(name: str) -> Any:
        if name in where:
            module, attribute = where[name]
            loaded = _load(module, f"{package}.{name}")
            value = getattr(loaded, attribute) if attribute else loaded
        elif otherwise is not None and not name.startswith("_"):
            value = otherwise(name)
        else:
            near = get_close_matches(name, where, 1)
            instead = f" Did you mean {near[0]!r}?" if near else ""
            instead = f" Write {gone[name]}." if gone and name in gone else instead
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{instead}")
        if package in sys.modules:  # not asked again
            setattr(sys.modules[package], name, value)
        return value

    names = sorted(where)
    return find, lambda: sorted({*filter(_is_special, vars(sys.modules[package])), *names}), names


def _load(module: str, wanted: str) -> Any:
    """Import a module without collections of garbage: imports make none, and a collection scans all of torch.

    Raises:
        ModuleNotFoundError: a package of an extra is not installed, for example; it names ``wanted``.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        said = f"{wanted} needs {error.name}, which is not installed. `workbench doctor` says how to install it."
        raise ModuleNotFoundError(said, name=error.name) from error
    finally:
        if collects:
            gc.enable()


def address_of(package: str, name: str) -> str:
    """Where the object is defined that a package loads under this name; modules of the package are their own place.

    >>> address_of("workbench.draw", "stages")
    'workbench.ui.pictures.stages.draw_stages'
    >>> address_of("workbench", "errors")
    'workbench.errors'
    """
    module, attribute = _places(import_module(package)._HOMES).get(name, (package, name))
    return f"{module}.{attribute}".rstrip(".")


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _places(homes: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, str]]:
    """Name -> module and the attribute there, empty for the module itself."""
    found = {}
    for module, names in homes.items():
        for name in names:
            own, has_other, attribute = name.partition("=")
            found[own] = module, attribute if has_other else own
    return found
