"""``workbench lab --no-browser``: the address that it prints opens the notebook, with the token."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.browser.server import LOG, isolated_environment, stop, wait_for, write_notebook
from tests.timeouts import PAGE_TIMEOUT_S

pytestmark = [pytest.mark.procs]


def test_the_printed_address_opens_the_notebook(tmp_path: Path) -> None:
    notebook = tmp_path / "my own.ipynb"
    write_notebook(notebook, ["1"])
    command = [sys.executable, "-m", "workbench", "lab", "--no-browser", "--notebook", str(notebook)]
    with (tmp_path / LOG).open("wb") as log:
        server = subprocess.Popen(
            command, env=isolated_environment(tmp_path), stdout=log, stderr=log, start_new_session=True
        )
    try:
        address = _printed_address(server, tmp_path / LOG)
        assert urlsplit(address).path == "/lab/tree/my%20own.ipynb"
        wait_for(address, server, tmp_path / LOG)
        with urllib.request.urlopen(address, timeout=PAGE_TIMEOUT_S) as page:
            assert page.status == 200 and "login" not in page.url
        with urllib.request.urlopen(
            address.replace("/lab/tree/", "/api/contents/"), timeout=PAGE_TIMEOUT_S
        ) as contents:
            assert b'"type": "notebook"' in contents.read()
    finally:
        stop(server)


def _printed_address(server: subprocess.Popen[bytes], log: Path) -> str:
    """The last address in the log, once there is one."""
    while server.poll() is None:
        found = re.findall(r"http://127\.0\.0\.1:\d+/\S+\?token=\w+$", log.read_text(errors="replace"), re.MULTILINE)
        if found:
            return str(found[-1])
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab ended:\n{log.read_text()[-3000:]}")
