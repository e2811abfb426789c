"""Forks a process for each program that a `client` asks for: ``python server.py FOLDER OWNER``.

It ends with the owner, and its programs end with their clients.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRELOADED = ("torch", "torch._dynamo", "torch.testing")
"""What takes long to load. Nothing of the project: its modules are loaded by each program, from the program's path."""
_PERIOD_S = 1.0


class Server:
    """The programs that run, each with the connection to its client."""

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self.listener, self.owner = listener, owner
        self.clients: dict[int, socket.socket] = {}
        self.wakes, self.is_woken = os.pipe()
        os.set_blocking(self.is_woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.is_woken)

    def serve(self) -> dict[str, Any] | None:
        """Fork for each request until the owner has ended, then return None. In a forked process, its request."""
        while Path(f"/proc/{self.owner}").exists():
            waited = [self.listener, self.wakes, *self.clients.values()]
            ready, _, _ = select.select(waited, [], [], _PERIOD_S)
            if self.wakes in ready:
                os.read(self.wakes, 1000)
            self._tell_ends()
            for pid in [pid for pid, client in self.clients.items() if client in ready]:
                os.kill(pid, signal.SIGKILL)  # a client says nothing more: it has ended
                self.clients.pop(pid).close()
            if self.listener in ready:
                client, _ = self.listener.accept()
                request = receive(client)
                if request is None:
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    client.close()
                    self._release()
                    return request
                for file in request["given"]:
                    os.close(file)
                self.clients[pid] = client
                _tell(client, pid)
        for pid in self.clients:
            os.kill(pid, signal.SIGKILL)
        return None

    def _tell_ends(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self.clients:
                client = self.clients.pop(pid)
                _tell(client, os.waitstatus_to_exitcode(status))
                client.close()

    def _release(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for client in [self.listener, *self.clients.values()]:
            client.close()
        for file in (self.wakes, self.is_woken):
            os.close(file)


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # a client may end at any moment; `Server.serve` sees it
        client.sendall(b"%d\n" % number)


def receive(client: socket.socket) -> dict[str, Any] | None:
    """A request, with the files that came with it; None if the client has ended."""
    given: list[int] = []
    with contextlib.suppress(OSError), client.makefile("rb") as text:
        size, given, _, _ = socket.recv_fds(client, 12, 250)
        if size:
            with contextlib.suppress(ValueError):  # an end of the text is missing
                return {**json.loads(text.read(int(size))), "given": given}
    for file in given:
        os.close(file)
    return None


def become(request: dict[str, Any], python: str) -> None:
    """Take over all that an interpreter gets from the process that starts it."""
    import numpy
    import torch

    os.setsid()
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 500) for file in request["given"]]
    for file in request["given"]:
        os.close(file)
    for file, number in zip(aside, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    threads = request["environment"].get("OMP_NUM_THREADS", str(len(request["cores"])))
    if threads != os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    sys.path[1 : 1 + len(_python_path())] = _python_path(request["environment"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["ignores_interrupts"] else signal.default_int_handler)
    sys.executable = python
    for stream in () if request["buffers"] else (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    numpy.random.seed()  # noqa: NPY002 - the generator that programs use


def _python_path(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Its folders, behind the program's own in ``sys.path``; the empty one is where an interpreter starts."""
    words = environment.get("PYTHONPATH", "")
    return [os.path.abspath(word) for word in words.split(os.pathsep)] if words else []


def run(arguments: list[str]) -> None:
    """What ``python`` does with its arguments."""
    first, *rest = arguments
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        text, name = rest[0].encode(), "<string>"
    else:
        sys.argv, sys.path[0] = arguments, str(Path(first).resolve().parent)
        text, name = Path(first).read_bytes(), str(Path(first).absolute())
        main.__file__ = name
    exec(compile(text, name, "exec"), vars(main))


def code_of(arguments: list[str]) -> int:
    """The exit code of a program, after it has run."""
    try:
        run(arguments)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:  # noqa: BLE001 - an interpreter ends so
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def end(code: int) -> None:
    """Do what an interpreter does at its end, but leave the memory to the system: that is half a second less."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main(folder: str, owner: str) -> None:
    """Load, listen, and serve. In a forked process, run the program."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so the programs' collectors do not copy the pages that they share with this process
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen(100)
    os.write(1, b"ready\n")
    os.dup2(2, 1)
    request = Server(listener, int(owner)).serve()
    if request is not None:
        become(request, f"{folder}/python")
        end(code_of(request["arguments"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
