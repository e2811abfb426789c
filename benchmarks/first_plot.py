"""Seconds and clicks from ``workbench lab`` to the first plot that moves, in a real page: the first notebook, as it is.

python -m benchmarks.first_plot [launches]
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tests.browser.page import POINTS, ROOT, WIDE, LabPage, new_page
from tests.browser.server import CHROMIUM_OPTIONS, find_chromium, isolated_environment, stop

NOTEBOOK = "01-compare-strategies.ipynb"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/lab\S*token=\w+")
MOVING = f"() => ({POINTS})('throughput') > 5"
"""So many points that the reader has seen the curve grow."""


class Clicks:
    """Clicks, and the seconds since the start."""

    def __init__(self) -> None:
        self.started, self.number = time.perf_counter(), 0

    def click(self, locator: object) -> None:
        locator.click()  # type: ignore[attr-defined]
        self.number += 1

    def say(self, what: str) -> float:
        seconds = time.perf_counter() - self.started
        print(f"{seconds:6.1f} s, {self.number} clicks: {what}", flush=True)
        return seconds


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """The address that ``workbench lab`` prints; ends the server behind it."""
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, folder)
    command = [sys.executable, "-m", "workbench", "lab", "--no-browser", "--notebook", str(folder / NOTEBOOK), "--"]
    command += ["--LabApp.expose_app_in_browser=True"]  # for what a page is waited for
    environment = isolated_environment(folder) | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert server.stdout is not None
    try:
        yield find_address(server.stdout)
    finally:
        stop(server)  # type: ignore[arg-type]


def find_address(lines: IO[str]) -> str:
    """The address in a server's output. A thread reads on, because a full pipe would stop the server.

    Raises:
        RuntimeError: the output ends without one.
    """
    said = []
    for line in lines:
        if match := ADDRESS.search(line):
            threading.Thread(target=_read_on, args=(lines,), daemon=True).start()
            return match[0]
        said.append(line)
    raise RuntimeError(f"workbench lab ended before it printed an address. Its last lines:\n{''.join(said[-20:])}")


def _read_on(lines: IO[str]) -> None:
    with suppress(ValueError):  # closed by who has started the server
        deque(lines, 0)


def measure() -> float:
    """Seconds of one launch."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=CHROMIUM_OPTIONS)
        page = new_page(browser, viewport=WIDE)
        clicks = Clicks()
        with running(Path(name)) as address:
            clicks.say("the address is there")
            LabPage(page).open(address)
            clicks.say("the notebook is open, its kernel idle")
            clicks.click(page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")))
            clicks.click(page.locator("[data-command='runmenu:run-all']"))
            page.wait_for_selector(".wb-panel .wb-row", state="attached")  # the run shows another tab
            clicks.say("the panel is there, and a cell below runs it")
            page.wait_for_selector(".wb-panel .wb-state")
            clicks.say("the run has begun")
            page.locator(".wb-panel .wb-stays").first.scroll_into_view_if_needed()
            page.wait_for_function(MOVING)
            seconds = clicks.say("the plot moves")
            if picture := os.environ.get("WORKBENCH_PICTURE"):
                page.screenshot(path=picture)
        browser.close()
    return seconds


if __name__ == "__main__":
    launches = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    found = [measure() for _ in range(launches)]
    print(f"median {statistics.median(found):.1f} s of {launches} launches: {', '.join(f'{s:.1f}' for s in found)}")
