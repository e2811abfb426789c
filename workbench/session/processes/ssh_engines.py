"""Engines over SSH: one connection starts an engine, lasts as long as it, and brings its last lines.

ipyparallel's own launcher opens five connections for an engine, and starts a Python with three of them, which imports
IPython or ipyparallel before the engine does.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from signal import SIGKILL
from typing import IO, Any

from ipyparallel.cluster.launcher import SSHEngineLauncher, SSHEngineSetLauncher
from traitlets import default

from workbench.session.processes import ssh

_END_TIMEOUT_S = 1.0
_POLL_S = 0.02
_SHOWN_LINES = 20
_MAX_BYTES = 1 << 16
_PID = re.compile(r"^__pid=(\d+)__\n", re.MULTILINE)


class SshEngine(SSHEngineLauncher):
    """An engine on another host. Its key goes there through the connection, not in a command line, which all see."""

    ssh_args: list[str]
    scp_args: list[str]
    _ssh: subprocess.Popen[bytes] | None = None
    _said: IO[bytes]
    _text = ""

    @default("to_send")
    def _nothing_to_send(self) -> list[tuple[str, str]]:
        return []  # the environment has the controller's address and key

    def start(self, hostname: str, user: str | None = None, port: str | None = None) -> None:
        """Open the connection and wait until the engine's process runs.

        Raises:
            RuntimeError: the connection has ended before; the text is what ssh or the shell said.
        """
        self.hostname = hostname
        if user is not None:
            self.user = user
        if port is not None:
            self.ssh_args = [*self.ssh_args, "-p", port]
            self.scp_args = [*self.scp_args, "-P", port]
        self.send_files()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - it lasts as long as the engine
        script = _script(self.program + self.program_args, self.get_env(), self.remote_output_file)
        with tempfile.TemporaryFile() as text:
            text.write(script.encode())
            text.seek(0)
            command = [*ssh.command_to(self._ssh_command(), self.location), "sh -s"]
            streams: dict[str, Any] = {"stdin": text, "stdout": self._said, "stderr": subprocess.STDOUT}
            self._ssh = subprocess.Popen(command, start_new_session=True, **streams)
        while not (is_up := _PID.search(self._read())) and not self.has_ended:
            time.sleep(_POLL_S)
        if not is_up:
            raise RuntimeError(self.get_output().strip() or f"ssh ended with {self._ssh.returncode}")
        self.notify_start(self.location)

    @property
    def has_ended(self) -> bool:
        """Whether the engine has ended, or the connection to its host."""
        return self._ssh is None or self._ssh.poll() is not None

    def get_output(self, remove: bool = False) -> str:
        """The last lines of an engine that has ended, or what ssh said."""
        return _PID.sub("", self._read())

    async def join(self, timeout: float | None = None) -> None:
        """Wait for the end. Raises TimeoutError."""
        if self._ssh is not None:
            try:
                await asyncio.to_thread(self._ssh.wait, timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{self.location}: the engine has not ended") from None

    def signal(self, sig: int) -> None:
        """Send a signal, by another connection."""
        if not self.has_ended and (pid := _PID.search(self._read())) is not None:
            ssh.run_on(self._ssh_command(), self.location, f"kill -{int(sig)} {pid[1]}")

    async def stop(self) -> None:
        """End the engine, unless it is just about to end. Raises TimeoutError."""
        if self._ssh is None:
            return
        try:
            await self.join(_END_TIMEOUT_S)
        except TimeoutError:
            await asyncio.to_thread(self.signal, SIGKILL)
            await self.join(_END_TIMEOUT_S)
        finally:
            self._ssh.kill()
            self._ssh.wait()
            self._read()

    def _ssh_command(self) -> list[str]:
        return [*self.ssh_cmd, *self.ssh_args]

    def _read(self) -> str:
        """What has come, from a file whose position ssh shares; closes it after the end."""
        if self._ssh is not None and not self._said.closed:
            is_all = self.has_ended
            self._text = os.pread(self._said.fileno(), _MAX_BYTES, 0).decode(errors="replace")
            if is_all:
                self._said.close()
        return self._text


class SshEngineSet(SSHEngineSetLauncher):
    """Engines on one host."""

    launcher_class = SshEngine

    def poll(self) -> None:
        """Notice that an engine has ended."""
        if any(engine.has_ended for engine in self.launchers.values()):
            self.notify_stop({})


def _script(command: Sequence[str], environment: Mapping[str, object], output: str) -> str:
    """The lines of a shell that runs an engine to its end, and then prints the last lines of its output.

    The engine runs in the foreground: a shell lets what runs in the background ignore interrupts.
    """
    log = shlex.quote(output)
    engine = shlex.join(["sh", "-c", 'echo "__pid=$$__" >&3; exec "$@" 3>&-', "sh", *command])
    return "\n".join(
        [
            "umask 077",
            f'mkdir -p "$(dirname {log})"',
            *(f"export {name}={shlex.quote(str(value))}" for name, value in environment.items()),
            f"{engine} 3>&1 >{log} 2>&1 </dev/null",
            f"tail -n {_SHOWN_LINES} {log}",
            f"rm -f {log}",
            "",
        ]
    )
