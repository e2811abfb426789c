"""Forks engines from one process that has loaded torch, so that torch is loaded once and not once per engine.

On the notebook's side `ForkServer` starts ``python -m workbench.session.processes.fork_server`` and talks to it over a
socket, one line of JSON per request and per answer. The server loads what every engine needs. Then it forks an engine
per request. It does not compute, holds no threads and does not touch a GPU, so a fork is as good as a new interpreter.
The server ends with the notebook, and its engines end with it (see `watchdog`).

Libraries read some environment variables only while they load. Engines share a server only if these variables
(`load_environment`) are equal.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from workbench.session.processes import watchdog

PRELOADED = ("workbench.tensors.world", "torch._dynamo", "ipyparallel.engine.app")
"""Modules that engines need. A process that makes its first optimizer loads the second, which takes longest."""
_READ_AT_LOAD = (
    "ATEN_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH",
)  # fmt: skip
"""Variables with these beginnings are read by interpreters and libraries while they load."""
_SEEDED_AT_LOAD = ("numpy.random", "sympy.core.random")
"""Modules with a generator for the whole process, which `seed` seeds from the system's entropy."""
_PERIOD_S = 0.5

keeps_servers = False
"""Whether servers outlive the last session that uses them. Tests set it: they start many sessions in one process."""
_servers: list[ForkServer] = []


def load_environment(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that must be set before a process loads torch, as (name, value)."""
    return tuple(sorted((name, value) for name, value in environment.items() if name.startswith(_READ_AT_LOAD)))


class ForkServer:
    """A process that forks engines. `shared` returns the one that fits an environment, until `release`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.key = load_environment(environment)
        self.users: set[object] = set()
        self._is_ready = False
        self._turn = threading.Lock()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._answers = self._socket.makefile("r", encoding="utf-8")

    @classmethod
    def shared(cls, environment: Mapping[str, str], user: object) -> ForkServer:
        """The server for this environment; ``user`` uses it from now on. A new one begins to load at once."""
        key = load_environment(environment)
        server = next((each for each in _servers if each.key == key and not each.has_ended()), None)
        if server is None:
            _servers.append(server := cls(environment))
        server.users.add(user)
        return server

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def is_ready(self) -> bool:
        """Whether the server has loaded everything. Does not wait."""
        if not self._is_ready and select.select([self._socket], [], [], 0)[0]:
            self._is_ready = bool(self._answers.readline())
        return self._is_ready

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, output: str
    ) -> psutil.Process:
        """Start a process that runs ``watchdog.main(arguments)``. Its output is appended to a file.

        Call it once the server is ready.

        Raises:
            EOFError: the server has ended.
        """
        request = {"arguments": arguments, "environment": dict(environment), "folder": folder, "output": output}
        process = psutil.Process(self._ask(request))
        self._ask({"reap": process.pid})  # not before: its number would be free again
        return process

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a process of this server, negative for a signal. None where it is unknown."""
        try:
            code = self._ask({"exit_code": pid})
        except EOFError:
            return None
        return None if code is None else int(code)

    def output(self) -> str:
        """The server's output so far, for the message of an error."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def close(self) -> None:
        """End the server and its engines. Safe to call twice."""
        if self in _servers:
            _servers.remove(self)
        self._answers.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        answer = ""
        with self._turn, suppress(OSError):
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            answer = self._answers.readline()
        if not answer:
            raise EOFError("the process that forks engines has ended")
        return json.loads(answer)


def release(user: object, still_used: Collection[ForkServer | None] = ()) -> None:
    """End the user's servers, but for those ``still_used``, and those that others use."""
    for server in [each for each in _servers if user in each.users and each not in still_used]:
        server.users.remove(user)
        if not server.users and not keeps_servers:
            server.close()


def reap(exit_codes: dict[int, int | None]) -> None:
    """Ask for the exit codes that are None. A signal may interrupt this, and its own call find what this one wants."""
    for pid in [pid for pid, code in exit_codes.items() if code is None]:
        with suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                exit_codes[pid] = os.waitstatus_to_exitcode(status)


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answer requests until the notebook has ended, then return None. In each forked process, return its request."""
    exit_codes: dict[int, int | None] = {}
    """Exit codes of processes that may be reaped; None while they run."""
    signal.signal(signal.SIGCHLD, lambda *_: reap(exit_codes))
    notebook, requests = os.getppid(), connection.makefile("r", encoding="utf-8")
    while os.getppid() == notebook:
        if not select.select([connection], [], [], _PERIOD_S)[0]:
            continue
        line = requests.readline()
        if not line:
            break
        request = json.loads(line)
        if "exit_code" in request:
            answer = exit_codes.get(request["exit_code"])
        elif "reap" in request:
            answer = exit_codes[request["reap"]] = None
            reap(exit_codes)
        else:
            answer = os.fork()
            if answer == 0:
                return request
        connection.sendall(json.dumps(answer).encode() + b"\n")
    return None


def become(request: dict[str, Any]) -> list[str]:
    """Do what ``subprocess.Popen`` does between fork and exec. Returns the arguments of `watchdog.main`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    atexit.register(gc.unfreeze)  # else extension modules report all of it as leaked
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    if watchdog.OWNER in os.environ:
        os.environ[watchdog.OWNER] = str(os.getppid())
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    seed_anew()
    return list(request["arguments"])


def seed_anew() -> None:
    """Give this process random numbers of its own. Libraries have seeded their generators in the server, and all
    forked processes would go on from there; Python itself seeds `random` in each of them.
    """
    import torch

    torch.default_generator.seed()
    for name in _SEEDED_AT_LOAD:
        if name in sys.modules:
            sys.modules[name].seed()


def main(argv: Sequence[str]) -> None:
    """Load, report that, and serve. In a forked process, run the engine."""
    with socket.socket(fileno=int(argv[0])) as connection:
        for name in PRELOADED:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # so the engines' collectors do not copy the pages that they share with this process
        connection.sendall(b'"ready"\n')
        request = serve(connection)
    if request is not None:
        watchdog.main(become(request))


if __name__ == "__main__":
    main(sys.argv[1:])
