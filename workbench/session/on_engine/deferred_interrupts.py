"""Defers an interrupt to where it does no harm: out of imports, and into the code of a request.

A kernel catches an interrupt of the code that it runs. One that comes while it reads the request or writes the reply
ends this instead: nobody gets a reply, and the engine, which seems to be stuck, would be killed with its variables. So
such an interrupt waits for the code of the request, or is forgotten with a request that has run.

An interrupt that is being handled is not followed by another one: an ``except`` or ``finally`` clause that saves
something has its time, until somebody asks for its end, too. Where ranks are stopped because one has failed, a clause
of another one for an error of its own has this time, too.

A package whose import breaks off may never work in this process again.

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
import functools
import importlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from workbench.session import protocol
from workbench.session.on_engine import current_request
from workbench.session.on_engine.shell import current_tag

#: torch checks the shapes of results with it, so the first product loads it.
PRELOADED = "sympy"
#: An engine without a request for so long loads it by itself.
IDLE_S = 2.0

_names: list[str] = []
"""The modules that the main thread is importing, outermost first."""
_is_interrupted = False
_interruptible: set[CodeType] = set()
"""Functions whose callers catch an interrupt; where there are none, all code is interruptible."""
_handled_first: list[BaseException] = []
"""The error that was handled when the first signal of this request came, and those that led to it."""


def install(kernel: Any) -> None:
    """Defer interrupts that would end no code of a request, or an import, and load in idle time what the first
    operation needs."""
    _count_imports()
    idle_since_s = [math.inf]

    # They replace hooks that set SIGINT's plain handler for a moment.
    def before() -> None:
        global _is_interrupted
        idle_since_s[0] = math.inf
        tag = current_tag()
        with current_request.beginning(tag.run if tag is not None else 0) as is_to_stop:
            signal.signal(signal.SIGINT, interrupt)
            _is_interrupted = is_to_stop  # forgets what came for an earlier request

    def after() -> None:
        current_request.end()
        _handled_first.clear()
        idle_since_s[0] = time.monotonic()

    kernel.pre_handler_hook, kernel.post_handler_hook = before, after
    _load_when_idle(lambda: idle_since_s[0])
    shell, run_cell, apply = kernel.shell, kernel.shell.run_cell_async, kernel.do_apply

    async def run_cell_async(*args: Any, **kwargs: Any) -> Any:
        raise_deferred()
        return await run_cell(*args, **kwargs)

    def do_apply(*args: Any, **kwargs: Any) -> Any:
        raise_deferred()
        return apply(*args, **kwargs)

    _interruptible.update((run_cell_async.__code__, apply.__code__))  # the latter runs now
    shell.run_cell_async = functools.wraps(run_cell)(run_cell_async)
    kernel.do_apply = _catching(do_apply, lambda: _interrupted_reply(kernel))
    shell.events.trigger = _catching(shell.events.trigger, lambda: None)
    before()  # already of this request


def allow_interrupts(function: Callable[..., Any]) -> None:
    """Let interrupts be raised in a function and in what it calls: its callers catch them."""
    _interruptible.add(function.__code__)


def _catching(function: Callable[..., Any], result_if_interrupted: Callable[[], Any]) -> Callable[..., Any]:
    """Let interrupts end a function. Two may come: the second ends the function while it handles the first."""
    _interruptible.add(function.__code__)

    @functools.wraps(function)
    def catching(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            return result_if_interrupted()

    return catching


def _interrupted_reply(kernel: Any) -> tuple[dict[str, Any], list[bytes]]:
    """What ``do_apply`` returns for a function that was interrupted."""
    with contextlib.suppress(KeyboardInterrupt):
        kernel.shell.showtraceback()
    told = {"status": "error", "ename": "KeyboardInterrupt", "evalue": "", "traceback": []}
    return {**told, "engine_info": kernel.get_engine_info(method="apply")}, []


def raise_deferred() -> None:
    """Raise an interrupt that has come since the request began. Call it first in the code of a request.

    Raises:
        KeyboardInterrupt: there was one.
    """
    global _is_interrupted
    if _is_interrupted:
        _is_interrupted = False
        raise KeyboardInterrupt


def importing() -> str:
    """The module that the running code imports on the main thread, or an empty string. Call it from any thread."""
    with contextlib.suppress(IndexError):
        return _names[0]
    return ""


def handles() -> str:
    """What the main thread runs an ``except`` or ``finally`` clause for: an interrupt, an error, or nothing.

    Call it from any thread.
    """
    error = _handled()
    return protocol.INTERRUPT if was_interrupted(error) else protocol.ERROR if error is not None else ""


def _handled() -> BaseException | None:
    found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    return found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12


def was_interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt led to this exception."""
    return any(isinstance(each, KeyboardInterrupt) for each in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and all that led to it, each once: ``raise error from error`` makes a circle."""
    found, todo = dict[int, BaseException](), [error]
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            todo += [each.__cause__, each.__context__]
    return iter(found.values())


def interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Handle SIGINT: raise KeyboardInterrupt, or record it for the end of the import or the code of the request.

    It does nothing in a clause that the stop of the run spares.

    Raises:
        KeyboardInterrupt: the main thread imports no module now, and runs the code of a request.
    """
    global _is_interrupted
    if _is_spared():
        return
    if not _names and _is_in_code(frame):
        raise KeyboardInterrupt
    _is_interrupted = True


def _is_spared() -> bool:
    """Whether a clause has its time. Those for errors that come later have none: a loop may handle one after another,
    as one that polls a queue."""
    kind, found = handles(), list(causes(_handled()))
    if kind == protocol.ERROR and not _handled_first:
        _handled_first.extend(found)
    is_under_way = kind == protocol.INTERRUPT or not {*map(id, found)}.isdisjoint(map(id, _handled_first))
    return is_under_way and kind in current_request.spared()


def _is_in_code(frame: FrameType | None) -> bool:
    """Whether an interrupt here is caught and gets a reply."""
    while frame is not None and frame.f_code not in _interruptible:
        frame = frame.f_back
    return frame is not None or not _interruptible


def _count_imports() -> None:
    bootstrap: Any = _frozen_importlib
    bootstrap._find_and_load = _counted(bootstrap._find_and_load, lambda name: name)
    bootstrap._exec = _counted(bootstrap._exec, lambda spec: spec.name)


def _counted(load: Callable[..., Any], name_of: Callable[[Any], str]) -> Callable[..., Any]:
    main = threading.main_thread().ident

    def load_whole(what: Any, *others: Any) -> Any:
        if threading.get_ident() != main:
            return load(what, *others)
        _names.append(name_of(what))
        try:
            return load(what, *others)
        finally:
            _names.pop()
            if not _names and _is_interrupted and _is_in_code(sys._getframe()):
                raise_deferred()

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
