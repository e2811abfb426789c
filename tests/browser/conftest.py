"""A real JupyterLab with the project's notebooks, and a real (headless) Chromium that looks at it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
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


def screenshots_wanted() -> bool:
    """Pictures for the README are written only when asked for, so that tests change no file."""
    return os.environ.get("WORKBENCH_SCREENSHOTS") == "1"


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium; without one the tests are skipped, or fail under WORKBENCH_REQUIRE_BROWSER=1."""
    wanted = os.environ.get("WORKBENCH_CHROMIUM")
    found = wanted if wanted and Path(wanted).exists() else shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        reason = "no chromium found (install Debian's package chromium, or set WORKBENCH_CHROMIUM to its path)"
        if os.environ.get("WORKBENCH_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@dataclass
class LabServer:
    """A running JupyterLab whose root is a copy of the notebooks."""

    url: str
    folder: Path

    def shut_down_kernels(self) -> None:
        """End all kernels (and with them their engines), so that the next page starts afresh."""
        for session in json.loads(self._ask("GET", "/api/sessions")):
            self._ask("DELETE", f"/api/sessions/{session['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, method=method, headers={"Authorization": f"token {TOKEN}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def notebook_url(self, name: str) -> str:
        return f"{self.url}/lab/tree/{name}?token={TOKEN}&reset"


@pytest.fixture(scope="session")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    folder = tmp_path_factory.mktemp("lab")
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, folder)
    refuse_news(folder)
    port = free_port()
    log = (folder / "server.log").open("wb")
    server = subprocess.Popen(
        lab_command(port, folder),
        cwd=folder,
        env=lab_environment(folder),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        wait_for_server(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", server, folder / "server.log")
        yield LabServer(f"http://127.0.0.1:{port}", folder)
    finally:
        stop(server)
        log.close()


def lab_command(port: int, folder: Path) -> list[str]:
    options = {
        "--ip": "127.0.0.1",
        "--port": str(port),
        "--IdentityProvider.token": TOKEN,
        "--ServerApp.root_dir": str(folder),
        "--ServerApp.port_retries": "0",
        "--LabApp.expose_app_in_browser": "True",
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


def lab_environment(folder: Path) -> dict[str, str]:
    """Nothing of the user's Jupyter is read or written."""
    places = {
        name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    return (
        os.environ | places | {"IPYTHONDIR": str(folder / "ipython"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "ws")}
    )


def refuse_news(folder: Path) -> None:
    """JupyterLab asks new users whether they want news, in a box that would cover what we look at."""
    settings = folder / "jupyter_config_dir" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')


def free_port() -> int:
    """One below those that the system and ZeroMQ choose from, so that nobody takes it before the server does."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def wait_for_server(url: str, server: subprocess.Popen[bytes], log: Path, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert server.poll() is None, f"JupyterLab ended:\n{log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not answer within {timeout_s} s:\n{log.read_text()[-3000:]}")


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server; it ends its kernels, and these their engines."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@dataclass
class LabPage:
    """One notebook open in JupyterLab, with everything that its console complained about."""

    page: Any
    errors: list[str] = field(default_factory=list)

    def run_cells(self, last: int) -> None:
        """Run the cells up to number ``last`` (counted from 0, text cells too)."""
        script = "last => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = last; return 1 }"
        self.page.evaluate(script, last + 1)
        # A command's promise ends with the run; handing it out would block until then.
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-above'); return 1 }")

    def wait_for_output(self, selector: str, timeout_s: float = 90) -> None:
        """Wait for something that a cell shows; an error in a cell fails at once, with its text."""
        error = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']"
        self.page.wait_for_selector(f"{selector}, {error}", timeout=timeout_s * 1000)
        shown = self.page.locator(error)
        assert shown.count() == 0, shown.first.inner_text()

    def points(self, trace: str) -> int:
        """Points of a trace of the live figure."""
        script = """name => {
            const plot = document.querySelector('.wb-panel .js-plotly-plot');
            const trace = plot?.data?.find(trace => trace.name === name);
            return trace?.x?.length ?? 0;
        }"""
        return int(self.page.evaluate(script, trace))

    def dark(self, on: bool) -> None:
        theme = "JupyterLab Dark" if on else "JupyterLab Light"
        script = "theme => { window.jupyterapp.commands.execute('apputils:change-theme', {theme}); return 1 }"
        self.page.evaluate(script, theme)
        self.page.wait_for_selector(f"body[data-jp-theme-light='{'false' if on else 'true'}']", state="attached")
        self.page.wait_for_timeout(500)

    def screenshot(self, name: str, locator: Any) -> None:
        """Keep a picture in docs/images, if pictures are wanted."""
        if screenshots_wanted():
            locator.screenshot(path=IMAGES / name)


@pytest.fixture(scope="module")
def open_notebook(chromium: str, lab: LabServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that opens a notebook and waits for its kernel; console errors fail the module's last test."""
    from playwright.sync_api import sync_playwright

    opened: list[LabPage] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_OPTIONS)

        def open_page(name: str) -> LabPage:
            page = browser.new_page(viewport={"width": 1680, "height": 1400})
            result = LabPage(page)
            opened.append(result)
            page.on("console", lambda message: result.errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: result.errors.append(str(error)))
            page.goto(lab.notebook_url(name))
            page.wait_for_function(KERNEL_IS_IDLE, timeout=60_000)
            return result

        yield open_page
        for lab_page in opened:  # to look at after a failure
            lab_page.page.screenshot(path=lab.folder / f"{Path(request.node.name).stem}.png")
        browser.close()
    lab.shut_down_kernels()
    assert [error for page in opened for error in page.errors] == []


KERNEL_IS_IDLE = """() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'
    && document.querySelectorAll('.jp-Cell').length > 3"""
