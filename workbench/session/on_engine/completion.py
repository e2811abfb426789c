"""Completion and help for the engine's variables. The control thread answers, also while the main thread is busy."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

from workbench.session.on_engine.shell import shell

MAX_COMPLETIONS = 200
_OFFERED = {"wb", "torch", "exit", "quit", "open", "get_ipython"}


def install(here: Any) -> None:
    """Make the shell's completion quick, and send help to the cell's output, since an engine has no pager."""
    from IPython.core import page

    here.set_hook("show_in_pager", page.as_hook(page.display_page), priority=90)
    if here.Completer is not None:
        here.Completer.use_jedi = False


def complete(code: str, offset: int) -> list[tuple[int, int, str, str]]:
    """Proposals for ``code`` at ``offset``: (start, end, text, kind) of each.

    Looks up attributes, but calls no function.
    """
    from IPython.core.completer import provisionalcompleter

    with provisionalcompleter():
        found = shell().Completer.completions(code, offset)
        return [
            (item.start + len(dot), item.end, item.text[len(dot) :], item.type or "")
            for item, _ in zip(found, range(MAX_COMPLETIONS), strict=False)
            for dot in ["." if item.text.startswith(".") else ""]
        ]


def names() -> list[str]:
    """Variables that cells have made in the engine's namespace, modules last."""
    here = shell()
    made = [name for name in here.user_ns if not name.startswith("_") and name not in here.user_ns_hidden]
    return sorted(set(made) - _OFFERED, key=lambda name: (isinstance(here.user_ns[name], ModuleType), name))


def inspect(name: str, detail_level: int = 0) -> dict[str, str] | None:
    """The help on a name as a MIME bundle; None if the engine does not know the name."""
    with contextlib.suppress(KeyError):
        bundle: dict[str, str] = shell().object_inspect_mime(name, detail_level=detail_level)
        return bundle
    return None
