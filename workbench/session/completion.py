"""Completion and help of a notebook: the engines' names in a ``%%global`` cell, the options of a magic on its line.

For names both ask the control thread of one engine, which answers while a cell runs. If no answer comes in time, the
notebook's own proposals remain.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from workbench.errors import WorkbenchError
from workbench.session import cluster, magic_commands
from workbench.session.ranks import parse_ranks

ANSWER_TIMEOUT_S = 0.5
_GLOBAL_CELL = re.compile(r"^(?:#\s*)?%%global\b(.*)\n")
_WORKBENCH_LINE = re.compile(r"^\s*%workbench\s+(\S+\s+)?(?:.*\s)?")


def install(ipython: Any) -> None:
    """Hook into the shell's completer and its help."""
    completer = getattr(ipython, "Completer", None)
    if completer is not None and propose not in completer.custom_matchers:
        completer.custom_matchers.append(propose)
    if not hasattr(ipython, "workbench_inspects"):
        ipython.workbench_inspects = ipython.object_inspect_mime
        ipython.object_inspect_mime = partial(_inspect, ipython.workbench_inspects)


def uninstall(ipython: Any) -> None:
    """Undo `install`."""
    completer = getattr(ipython, "Completer", None)
    if completer is not None and propose in completer.custom_matchers:
        completer.custom_matchers.remove(propose)
    if hasattr(ipython, "workbench_inspects"):
        ipython.object_inspect_mime = ipython.workbench_inspects
        del ipython.workbench_inspects


def propose(context: Any) -> dict[str, Any]:
    """A matcher for IPython's completer: in a ``%%global`` cell names of the engines, on a magic's line its words."""
    none: dict[str, Any] = {"completions": []}
    text = context.full_text
    if (line := _WORKBENCH_LINE.match(context.text_until_cursor)) is not None:
        return _fitting(context.token, _options_of("workbench", "line") if line.group(1) else magic_commands.COMMANDS)
    found = _GLOBAL_CELL.match(text if "\n" in text else text + "\n")
    if found is None or context.token.startswith("%"):
        return none
    if context.cursor_line == 0:
        return _fitting(context.token, _options_of("global", "cell"))
    code = text[found.end() :]
    before = code.split("\n")[: context.cursor_line - 1]
    offset = sum(len(line) + 1 for line in before) + context.cursor_position
    proposals = _ask(found.group(1), "complete", code=code, offset=offset)
    if not proposals:
        return none
    start = proposals[0][0]
    from IPython.core.completer import SimpleCompletion

    return {
        "completions": [SimpleCompletion(item, type=kind) for at, _, item, kind in proposals if at == start],
        "matched_fragment": code[start:offset],
        "suppress": True,
    }


propose.matcher_api_version = 2  # type: ignore[attr-defined]
propose.matcher_identifier = "workbench.engine_names"  # type: ignore[attr-defined]


def _options_of(magic: str, kind: str) -> list[str]:
    """The options of a magic."""
    from IPython import get_ipython

    found: Any = get_ipython().find_magic(magic, kind)
    return [name for action in found.parser._actions for name in action.option_strings if action.dest != "help"]


def _fitting(token: str, words: Iterable[str]) -> dict[str, Any]:
    """The words of a magic that begin with the text; nothing else fits on its line."""
    from IPython.core.completer import SimpleCompletion

    return {
        "completions": [SimpleCompletion(word, type="magic") for word in words if word.startswith(token)],
        "suppress": True,
    }


def _inspect(local: Callable[..., Any], oname: str, detail_level: int = 0, omit_sections: Any = ()) -> Any:
    """The shell's help, and the engines' for names that the notebook does not know."""
    try:
        return local(oname, detail_level=detail_level, omit_sections=omit_sections)
    except KeyError:
        found = _ask("", "inspect", name=oname, detail_level=detail_level)
        if found is None:
            raise
        return found


def _ask(options: str, operation: str, **arguments: Any) -> Any:
    """The answer of the first rank that the cell runs on; None without a session, or without an answer in time."""
    session = cluster.find_current()
    if session is None:
        return None
    with contextlib.suppress(WorkbenchError, ValueError):
        ranks = re.search(r"--ranks[ =](\S+)", options)
        rank = parse_ranks(ranks.group(1), session.num_engines)[0] if ranks else 0
        return session.ask(rank, operation, ANSWER_TIMEOUT_S, **arguments)
    return None
