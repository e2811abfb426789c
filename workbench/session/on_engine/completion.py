"""Completion and help for names that live on the engine, answered on its control thread while the main thread works."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

from workbench.session.on_engine.shell import shell

MAX_COMPLETIONS = 200
_OFFERED = {"wb", "torch", "exit", "quit", "open", "get_ipython"}


def install(here: Any) -> None:
    """Prepare the shell: quick completion, and help as output of the cell, since an engine has no pager."""
    from IPython.core import page

    here.set_hook("show_in_pager", page.as_hook(page.display_page), priority=90)
    if here.Completer is not None:
        here.Completer.use_jedi = False


def complete(code: str, offset: int) -> list[tuple[int, int, str, str]]:
    """What may stand at ``offset`` of ``code``: (start, end, text, kind) of every proposal.

    Attributes are looked up as at a prompt: nothing is called.
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
    """Variables of the engine's namespace that cells have made, modules last."""
    here = shell()
    made = [name for name in here.user_ns if not name.startswith("_") and name not in here.user_ns_hidden]
    return sorted(set(made) - _OFFERED, key=lambda name: (isinstance(here.user_ns[name], ModuleType), name))


def inspect(name: str, detail_level: int = 0) -> dict[str, str] | None:
    """The help on a name as a MIME bundle; None where the engine does not know it."""
    with contextlib.suppress(KeyError):
        bundle: dict[str, str] = shell().object_inspect_mime(name, detail_level=detail_level)
        return bundle
    return None
