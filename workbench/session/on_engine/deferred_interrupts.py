"""An interrupt waits for the end of an import: one that breaks off in the middle may never work again in this process.

Python forgets a package whose import has failed, and keeps those of its submodules that were complete. The next import
finds them loaded and does not set them on the new package: ``module 'sympy' has no attribute 'core'``, for as long as
the process lives. torch imports much on first use, so an interrupt of any cell may come at such a moment.

Every import that has to load something (a statement, ``importlib.import_module``, C code) calls
``importlib._bootstrap._find_and_load``, and ``importlib.reload`` calls ``_exec``. Both are replaced by a function that
counts, and that raises the interrupt which came meanwhile when the outermost import ends. Modules that are loaded do
not pass here, so that costs nothing where nothing is loaded.
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
#: Without a request for so long, an engine does that by itself.
IDLE_S = 2.0

_names: list[str] = []
"""What the main thread is importing, outermost first."""
_is_interrupted = False


def install(kernel: Any) -> None:
    """Hold interrupts of requests during imports, and load in idle time what the first operation needs."""
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
    """The module that the main thread is importing for the code that it runs, or an empty string; from any thread."""
    with contextlib.suppress(IndexError):
        return _names[0]
    return ""


def interrupt(signal_number: int, frame: Any) -> None:
    """Handles SIGINT: raises KeyboardInterrupt, if need be later.

    Raises:
        KeyboardInterrupt: the main thread imports nothing now.
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

    # Python leaves importlib's frames out of tracebacks, and out of what the stacklevel of a warning counts.
    load_whole.__code__ = load_whole.__code__.replace(co_filename=load.__code__.co_filename)
    return load_whole


def _load_when_idle(idle_since_s: Callable[[], float]) -> None:
    """Import sympy on a thread of its own, so that a cell which comes meanwhile runs at once.

    Two threads that import wait for each other in turn only in a circle, and sympy imports nothing that imports it.
    """

    def load() -> None:
        while time.monotonic() - idle_since_s() < IDLE_S:
            time.sleep(IDLE_S)
        importlib.import_module(PRELOADED)

    threading.Thread(target=load, name="workbench-imports", daemon=True).start()
