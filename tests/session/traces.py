"""What a session leaves on a machine: processes, listening ports, shared memory, files."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.timeouts import wait_until
from workbench.session.processes.folder import ProcessId, all_folders


@dataclass(frozen=True)
class Traces:
    """Processes of one session or of several, and what they hold; see `left`."""

    processes: tuple[ProcessId, ...]
    ports: tuple[int, ...]
    shared_memory: tuple[str, ...]
    folders: tuple[str, ...]

    @classmethod
    def of(cls, parent: int) -> Traces:
        """All that the descendants of a process have; its session folders are those that name them."""
        found = psutil.Process(parent).children(recursive=True)
        ports = set()
        for process in found:
            with suppress(psutil.Error):
                ports |= {place.laddr.port for place in process.net_connections() if place.status == "LISTEN"}
        processes = tuple(ProcessId.of(process.pid) for process in found)
        pids = {process.pid for process in found}
        own = [folder for folder in all_folders() if pids & {process.pid for process in folder.processes()}]
        folders = tuple(str(folder.path) for folder in own)
        return cls(processes, tuple(sorted(ports)), tuple(sorted(os.listdir("/dev/shm"))), folders)

    def left(self) -> dict[str, object]:
        """What of it is still there; shared memory of others is not."""
        return {
            "processes": [process.pid for process in self.processes if process.find()],
            "ports": [port for port in self.ports if _is_taken(port)],
            "folders": [path for path in self.folders if os.path.exists(path)],
        }

    def assert_gone(self) -> None:
        wait_until(lambda: not any(self.left().values()), lambda: f"the end of {self.left()}")
        more = set(os.listdir("/dev/shm")) - set(self.shared_memory)
        assert not {name for name in more if "workbench" in name or "torch" in name}, more


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are closing do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
