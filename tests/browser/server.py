"""A real JupyterLab of its own, which serves Notebook 7 too: nothing of the user's Jupyter is read or written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.timeouts import PAGE_TIMEOUT_S
from workbench.session.processes.ports import reserved_ports

TOKEN = "workbench-test"
CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
APPS = {"lab": "lab/tree", "notebook": "notebooks"}
"""Front ends and the paths under which they open a notebook."""
LOG = "server.log"


def find_chromium() -> str | None:
    """Path of a Chromium, if there is one."""
    wanted = os.environ.get("WORKBENCH_CHROMIUM")
    if wanted and Path(wanted).exists():
        return wanted
    return shutil.which("chromium") or shutil.which("chromium-browser")


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    """A notebook of code cells."""
    import nbformat  # takes seconds, which every worker would need that only looks for its tests

    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(cells)]
    )
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


@dataclass
class LabServer:
    """A running JupyterLab whose root is ``folder``."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes]

    def notebook_url(self, name: str, app: str = "lab") -> str:
        """Where a front end shows a notebook."""
        return f"{self.url}/{APPS[app]}/{name}?token={TOKEN}&reset"

    def log_lines(self, last: int = 60) -> str:
        """The end of its log."""
        return "\n".join((self.folder / LOG).read_text(errors="replace").splitlines()[-last:])

    def shut_down_kernels(self) -> None:
        """End all kernels (and with them their engines), so that the next page starts afresh."""
        for session in json.loads(self._ask("GET", "/api/sessions")):
            self._ask("DELETE", f"/api/sessions/{session['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, method=method, headers={"Authorization": f"token {TOKEN}"})
        with urllib.request.urlopen(request, timeout=PAGE_TIMEOUT_S) as answer:
            return bytes(answer.read())


@contextmanager
def running_lab(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[LabServer]:
    """A server that ends with the context, and with it its kernels and their engines."""
    _refuse_news(folder)
    log = folder / LOG
    with reserved_ports(1) as [port], log.open("wb") as output:
        process = subprocess.Popen(
            _command(port, folder),
            cwd=folder,
            env=isolated_environment(folder) | dict(environment or {}),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", process, log)
            yield LabServer(f"http://127.0.0.1:{port}", folder, process)
        finally:
            stop(process)


def _command(port: int, folder: Path) -> list[str]:
    options = {
        "--ip": "127.0.0.1",
        "--port": str(port),
        "--IdentityProvider.token": TOKEN,
        "--ServerApp.root_dir": str(folder),
        "--ServerApp.port_retries": "0",
        "--LabApp.expose_app_in_browser": "True",
        "--JupyterNotebookApp.expose_app_in_browser": "True",
        "--LabApp.news_url": "None",
        "--LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        *(f"{name}={value}" for name, value in options.items()),
    ]
    return command + (["--allow-root"] if os.geteuid() == 0 else [])


def isolated_environment(folder: Path) -> dict[str, str]:
    """Variables under which Jupyter and IPython read and write below a folder only. Sessions stay those of the tests,
    and of programs that are none, such as benchmarks, they are below the folder, too."""
    places = {
        name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    return (
        {"WORKBENCH_SESSIONS": str(folder / "sessions")}
        | os.environ
        | places
        | {"IPYTHONDIR": str(folder / "ipython"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "ws")}
    )


def _refuse_news(folder: Path) -> None:
    """JupyterLab asks new users whether they want news, in a box that would cover what we look at."""
    settings = folder / "jupyter_config_dir" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers: JupyterLab prints its address before it listens."""
    deadline = time.monotonic() + PAGE_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"JupyterLab ended:\n{log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(url, timeout=PAGE_TIMEOUT_S):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not answer within {PAGE_TIMEOUT_S} s:\n{log.read_text()[-3000:]}")


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a server, and whatever it has left in its process group."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
