"""A real JupyterLab with the project's notebooks, and a real (headless) Chromium that looks at it."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page import ROOT, WIDE, LabPage, new_page
from tests.browser.server import CHROMIUM_OPTIONS, LabServer, find_chromium, running_lab, write_notebook
from tests.timeouts import PAGE_TIMEOUT_S


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium; without one the tests are skipped, or fail under WORKBENCH_REQUIRE_BROWSER=1."""
    found = find_chromium()
    if found is None:
        reason = "no chromium found (install Debian's package chromium, or set WORKBENCH_CHROMIUM to its path)"
        if os.environ.get("WORKBENCH_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="package")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """A server whose root is a copy of the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, folder)
    with running_lab(folder) as server:
        yield server


@pytest.fixture(scope="package")
def browser(chromium: str) -> Iterator[Any]:
    """For the tests of this folder: while playwright runs, nothing else in this process may use asyncio."""
    from playwright.sync_api import expect, sync_playwright

    milliseconds = PAGE_TIMEOUT_S * 1000
    expect.set_options(timeout=milliseconds)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_OPTIONS, timeout=milliseconds)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def free_pages(browser: Any) -> list[LabPage]:
    """The page of JupyterLab that the file before has left, if it has: to load JupyterLab takes 10 CPU seconds."""
    return []


@pytest.fixture(scope="module")
def open_notebook(
    browser: Any, lab: LabServer, free_pages: list[LabPage], request: pytest.FixtureRequest
) -> Iterator[Any]:
    """A function that opens a notebook and waits for its kernel; console errors fail the module's last test.

    The page goes from file to file, until a test has failed, and files that open the same notebook share its kernel.
    What JupyterLab's server could not answer JupyterLab itself is a warning, with the end of the server's log.
    """
    opened: list[LabPage] = []
    failed = request.session.testsfailed

    def open_page(name: str, app: str = "lab", cells: Sequence[str] = ()) -> LabPage:
        """``cells``: what is written into the notebook, where it is opened anew."""
        lab_page = free_pages.pop() if app == "lab" and free_pages else None
        is_new = lab_page is None or not lab_page.shows(name)
        if lab_page is not None and is_new:
            lab_page.leave_notebook()
            lab.shut_down_kernels()
        if cells and is_new:
            write_notebook(lab.folder / name, cells)
        if lab_page is not None:
            lab_page.show_notebook(name)
        else:
            lab_page = LabPage(new_page(browser, viewport=WIDE), app)
            lab_page.open(lab.notebook_url(name, app))
        opened.append(lab_page)
        return lab_page

    yield open_page
    server_errors = [error for page in opened for error in page.server_errors]
    errors = [error for page in opened for error in page.errors]
    for number, lab_page in enumerate(opened):  # to look at after a failure
        lab_page.page.screenshot(path=lab.folder / f"{Path(request.node.name).stem}-{number}.png")
        if lab_page.app == "lab" and not free_pages and not errors and request.session.testsfailed == failed:
            free_pages.append(lab_page)
        else:
            lab_page.page.close()
    if not free_pages:
        lab.shut_down_kernels()
    for error in server_errors:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"{error}\n{lab.log_lines()}", stacklevel=1)
    assert errors == []
