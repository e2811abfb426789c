"""Defers an interrupt to the end of an import. A package whose import breaks off may never work in this process again.

Python forgets a package whose import has failed, but keeps its submodules that were complete. The next import finds
them loaded and does not set them on the new package: ``module 'sympy' has no attribute 'core'``, until the process
ends. torch imports much on first use, so an interrupt of any cell may come at such a moment.

Every import that has to load a module (a statement, ``importlib.import_module``, C code) calls
``importlib._bootstrap._find_and_load``, and ``importlib.reload`` calls ``_exec``. This module replaces both by a
function that counts imports. It raises a deferred interrupt when the outermost import ends. Imports of loaded modules
do not call these functions, so they cost nothing.
"""

from __future__ import annotations

import _frozen_importlib
import contextlib
import importlib
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

#: torch checks the shapes of results with it, so the first product loads it.
PRELOADED = "sympy"
#: An engine without a request for so long loads it by itself.
IDLE_S = 2.0

_names: list[str] = []
"""The modules that the main thread is importing, outermost first."""
_is_interrupted = False


def install(kernel: Any) -> None:
    """Defer interrupts of requests during imports, and load in idle time what the first operation needs."""
    _count_imports()
    plain_before, plain_after = kernel.pre_handler_hook, kernel.post_handler_hook
    idle_since_s = [math.inf]

    def before() -> None:
        idle_since_s[0] = math.inf
        plain_before()
        signal.signal(signal.SIGINT, interrupt)

    def after() -> None:
        plain_after()
        idle_since_s[0] = time.monotonic()

    kernel.pre_handler_hook, kernel.post_handler_hook = before, after
    signal.signal(signal.SIGINT, interrupt)  # of this request, whose end restores what was before
    _load_when_idle(lambda: idle_since_s[0])


def importing() -> str:
    """The module that the running code imports on the main thread, or an empty string. Call it from any thread."""
    with contextlib.suppress(IndexError):
        return _names[0]
    return ""


def interrupt(signal_number: int, frame: Any) -> None:
    """Handle SIGINT: raise KeyboardInterrupt, or record it for the end of the import.

    Raises:
        KeyboardInterrupt: the main thread imports no module now.
    """
    global _is_interrupted
    if not _names:
        raise KeyboardInterrupt
    _is_interrupted = True


def _count_imports() -> None:
    bootstrap: Any = _frozen_importlib
    bootstrap._find_and_load = _counted(bootstrap._find_and_load, lambda name: name)
    bootstrap._exec = _counted(bootstrap._exec, lambda spec: spec.name)


def _counted(load: Callable[..., Any], name_of: Callable[[Any], str]) -> Callable[..., Any]:
    main = threading.main_thread().ident

    def load_whole(what: Any, *others: Any) -> Any:
        global _is_interrupted
        if threading.get_ident() != main:
            return load(what, *others)
        _names.append(name_of(what))
        try:
            return load(what, *others)
        finally:
            _names.pop()
            if _is_interrupted and not _names:
                _is_interrupted = False
                raise KeyboardInterrupt

    # Python leaves importlib's frames out of tracebacks, and does not count them for the stacklevel of a warning.
    load_whole.__code__ = load_whole.__code__.replace(co_filename=load.__code__.co_filename)
    return load_whole


def _load_when_idle(idle_since_s: Callable[[], float]) -> None:
    """Import sympy on its own thread, so that a cell runs at once in the meantime.

    Two importing threads can block each other only if their modules import each other. No module that sympy imports
    imports sympy.
    """

    def load() -> None:
        while time.monotonic() - idle_since_s() < IDLE_S:
            time.sleep(IDLE_S)
        importlib.import_module(PRELOADED)

    threading.Thread(target=load, name="workbench-imports", daemon=True).start()
