"""Runs an engine or a controller that cannot outlive the notebook that started it.

``python -m workbench.session.processes.watchdog ipyparallel.engine ...`` watches its parent from a thread, which also
runs while the main thread is stuck in C. An engine ends itself. The controller also ends every process of the session
by id and start time, and removes the session's folder. No C code holds its interpreter for long, so it ends engines
whose own watch could not run.

Engines that are kept for another notebook watch their controller instead of their parent. Their controller watches no
process.

A controller without one of its threads would forward some kinds of messages and not others: cells would run, and no
interrupt would come. So it ends when one of them cannot listen. Processes that it forks end with it.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

PERIOD_S = 0.5
OWNER = "WORKBENCH_OWNER_PID"
"""The environment variable with the notebook's process id, for processes that end with it."""
CONTROLLER = "WORKBENCH_CONTROLLER"
"""The variable with the controller's process id and start time, for engines that outlive the notebook."""
CONNECTION = "WORKBENCH_CONNECTION_FILE"
"""The variable with the file of the controller's address, for engines that start at the same time as it."""
_POLL_S = 0.02


def watch(
    is_there: Callable[[], bool], on_orphaned: Callable[[], None], period_s: float = PERIOD_S
) -> threading.Thread:
    """Call ``on_orphaned`` within about ``period_s`` of the end of the process that this one depends on."""

    def wait() -> None:
        while is_there():
            time.sleep(period_s)
        on_orphaned()

    thread = threading.Thread(target=wait, name="workbench-parent-watch", daemon=True)
    thread.start()
    return thread


def end_this_process() -> None:
    """End this process by SIGKILL. Works from any thread, whatever the main thread does."""
    os.kill(os.getpid(), signal.SIGKILL)


def end_whole_session() -> None:
    """End the processes that the session's folder lists, remove the folder, then end this process."""
    try:
        from workbench.session.processes.folder import SessionFolder

        SessionFolder(Path(os.environ["WORKBENCH_SESSION_FOLDER"])).reap(spare={os.getpid()})
    finally:
        end_children()
        end_this_process()


def end_children() -> None:
    """End the processes that this one has started, such as the controller's heartbeat."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue


def end_with_threads() -> None:
    """End this process when a thread ends because its socket has failed, such as by a port that is taken."""
    import zmq

    report = threading.excepthook

    def end(error: threading.ExceptHookArgs) -> None:
        report(error)
        if isinstance(error.exc_value, zmq.ZMQError):
            sys.stderr.flush()
            end_children()
            end_this_process()

    threading.excepthook = end


def end_forks_with_this_process() -> None:
    """Let processes that this one forks end with it, also when it is killed while it forks."""
    parent = os.getpid()

    def watch_parent() -> None:
        nonlocal parent
        watch(has_parent(parent), end_this_process)
        parent = os.getpid()

    os.register_at_fork(after_in_child=watch_parent)


def has_parent(pid: int) -> Callable[[], bool]:
    """Whether this process is still a child of the one that started it."""
    return lambda: os.getppid() == pid


def is_running(process: str) -> Callable[[], bool]:
    """Whether the process that ``CONTROLLER`` names still runs."""
    from workbench.session.processes.folder import ProcessId

    known = ProcessId.parse(process)
    return lambda: known.find() is not None


def prepare_engine(connection_file: str) -> None:
    """Load torch while the controller starts, then pass the controller's address to the engine.

    There is no time limit: this process ends with its owner, and the owner notices a controller that ends.
    """
    import workbench.tensors.world  # noqa: F401

    while True:
        try:
            with open(connection_file, encoding="utf-8") as file:
                os.environ["IPP_CONNECTION_INFO"] = json.dumps(json.load(file))
            return
        except (FileNotFoundError, json.JSONDecodeError):  # not there, or not written to its end
            time.sleep(_POLL_S)


def main(argv: list[str]) -> None:
    """Run a module as ``python -m`` does, with its arguments, under the watch that fits it."""
    module, *arguments = argv
    is_controller = module.endswith("controller")
    if OWNER in os.environ:
        on_orphaned = end_whole_session if is_controller else end_this_process
        watch(has_parent(int(os.environ[OWNER])), on_orphaned)
    elif CONTROLLER in os.environ:
        watch(is_running(os.environ[CONTROLLER]), end_this_process)
    if is_controller:
        end_forks_with_this_process()
        end_with_threads()
    elif CONNECTION in os.environ:
        prepare_engine(os.environ[CONNECTION])
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
