"""Four ranks print 100,000 lines each into a real JupyterLab: page and kernel stay small, and the page answers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.browser.server import LabServer, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow, pytest.mark.timed]
NUM_LINES = 100_000
MOST_GROWTH_MB = 50
CELLS = [
    "%load_ext workbench\n%workbench start --engines 4 --device cpu",
    "import os\nprint('kernel', os.getpid())",
    "%%global\nfor i in range(1000): print('warm', i, wb.rank())",
    "print('warm enough')",
    f"%%global\nfor i in range({NUM_LINES}): print('token', i, wb.rank())",
    "print('all', 'printed')",
    "%workbench log --lines 1",
    "print('the', 'end')",
]


@pytest.fixture
def notebook(lab: LabServer) -> str:
    write_notebook(lab.folder / "flood.ipynb", CELLS)
    return "flood.ipynb"


def memory_mb(page: Any) -> float:
    """The page's JavaScript heap after a full collection."""
    devtools = page.context.new_cdp_session(page)
    for _ in range(2):
        devtools.send("HeapProfiler.collectGarbage")
    devtools.send("Performance.enable")
    metrics = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
    devtools.detach()
    return float(metrics["JSHeapUsedSize"] / 1e6)


@contextmanager
def peak_memory_mb(process: psutil.Process) -> Iterator[list[float]]:
    """The largest resident size that a process has inside the context, as the list's only entry."""
    peak, over = [0.0], threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            peak[0] = max(peak[0], process.memory_info().rss / 1e6)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def wait_for_text(page: Any, text: str) -> None:
    page.locator(".jp-OutputArea-output", has_text=text).first.wait_for()


def test_a_flood_of_output(open_notebook: Any, notebook: str) -> None:
    lab_page = open_notebook(notebook)
    page = lab_page.page
    lab_page.run_cell(0, 3)
    wait_for_text(page, "warm enough")
    kernel = psutil.Process(int(page.locator("pre", has_text="kernel ").first.inner_text().split()[-1]))
    page.evaluate("""() => {
        window.longestGap = 0;
        let last = performance.now();
        setInterval(() => {
            const now = performance.now();
            window.longestGap = Math.max(window.longestGap, now - last);
            last = now;
        }, 20);
    }""")
    before_mb, kernel_before_mb = memory_mb(page), kernel.memory_info().rss / 1e6
    with peak_memory_mb(kernel) as peak:
        lab_page.run_cell(4, 5)
        wait_for_text(page, "all printed")
    gap_s = page.evaluate("() => window.longestGap") / 1000
    grown_mb, kernel_grown_mb = memory_mb(page) - before_mb, peak[0] - kernel_before_mb
    figures = f"page {grown_mb:.1f} MB, kernel at most {kernel_grown_mb:.1f} MB, longest gap {gap_s:.2f} s"
    sys.stdout.write(f"\n{figures}\n")  # for pytest -s
    assert grown_mb < MOST_GROWTH_MB and kernel_grown_mb < MOST_GROWTH_MB, figures
    assert gap_s < 2, figures

    lab_page.run_cell(6, 7)
    wait_for_text(page, "the end")
    shown = page.locator(".jp-OutputArea-output", has_text="lines, all of them in").first.inner_text()
    paths = [line.rpartition(" in ")[2] for line in shown.splitlines() if "all of them in" in line]
    assert len(paths) == 4
    for rank, path in enumerate(paths):
        lines = Path(path).read_text().splitlines()
        assert lines == [f"token {i} {rank}" for i in range(NUM_LINES)]
