"""Answers the notebook on the engine's control thread, also while the main thread is stuck in C.

Operations:

* ``status``: a `RankStatus` with the main thread's stack.
* ``activity``: a `RankActivity`, cheap enough to be asked every second.
* ``interrupt``: the state of before, and interrupt a run.
* ``abort``: end a run's waits for other ranks.
* ``command``: let a training run pause, resume, change its strategy or stop.
* ``complete``, ``inspect``, ``names``: completion, help and variables of the engine.
* ``debug``: let a debugger listen.
* ``progress``: how many exchanges the program has called.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from workbench.session import protocol
from workbench.session.on_engine import activity as engine_activity
from workbench.session.on_engine import completion as engine_assist
from workbench.session.on_engine import connections as engine_connections
from workbench.session.on_engine import current_request
from workbench.session.on_engine import debugger as engine_debug
from workbench.session.on_engine import deferred_interrupts as engine_imports
from workbench.session.on_engine import interruptible_waits as engine_waits
from workbench.session.on_engine import progress as engine_progress
from workbench.session.on_engine import shell as engine_shell
from workbench.session.on_engine.failures import frames_of_stack
from workbench.session.on_engine.shell import joined_world


def install(shell: Any) -> None:
    """Register the handler. ipyparallel's nanny relays message types that it does not know."""
    kernel = shell.kernel

    def handle(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        reply, buffers = _answer(parent["content"])
        kernel.session.send(stream, protocol.CONTROL_REPLY, reply, parent=parent, ident=ident, buffers=buffers)

    kernel.control_handlers[protocol.CONTROL_REQUEST] = handle


def _answer(content: dict[str, Any]) -> tuple[dict[str, str], list[bytes]]:
    try:
        result = _OPERATIONS[content["op"]](**content.get("arguments", {}))
        return {"status": "ok"}, [protocol.dump(result)]
    except Exception as error:  # noqa: BLE001 - sent to the notebook
        return {"status": "error", "message": f"{type(error).__name__}: {error}"}, []


def status() -> protocol.RankStatus:
    """The present state of this rank. Never waits for the main thread."""
    import psutil

    stack = frames_of_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    importing = engine_imports.importing()
    run, is_handling = current_request.state()
    world = joined_world()
    return protocol.RankStatus(
        rank=int(os.environ.get("RANK", "-1")),
        alive=True,
        pid=os.getpid(),
        device=str(world.device) if world is not None else "",
        transport_groups=world.transport_groups if world is not None else (),
        memory_bytes=psutil.Process().memory_info().rss,
        busy=bool(stack),
        doing=protocol.describe_place(stack, importing),
        stack=stack,
        importing=importing,
        run=run,
        is_handling=is_handling,
        handles=engine_imports.handles(),
    )


def interrupt(run: int, spared: Sequence[str]) -> protocol.RankStatus:
    """Interrupt a run; returns the state of before. Does nothing to a later run; see `current_request.stop`."""
    found = status()
    current_request.stop(run, spared)
    return found


def abort(run: int, reason: str, pids: Sequence[int], spared: Sequence[str], all_are_there: bool) -> None:
    """End the main thread's wait for other ranks, unless a later run has begun: that has another world.

    Args:
        pids: the processes of the engines on this host.
        spared: do nothing while an ``except`` or ``finally`` clause handles one of these, and does not wait.
        all_are_there: such a clause may also wait for the other ranks, which run theirs.
    """
    with current_request.unless_later(run) as is_in_time:
        world = joined_world()
        is_spared = engine_imports.handles() in spared
        if not is_in_time or (is_spared and (all_are_there or not engine_activity.activity(world).waits)):
            return
        engine_waits.abort(reason)
        if world is not None:
            world.abort(reason)
        engine_connections.break_to(pids)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "status": status,
    "activity": lambda: engine_activity.activity(joined_world()),
    "interrupt": interrupt,
    "abort": abort,
    "command": engine_shell.add_command,
    "complete": engine_assist.complete,
    "inspect": engine_assist.inspect,
    "names": engine_assist.names,
    "debug": engine_debug.listen,
    "progress": engine_progress.progress,
}
