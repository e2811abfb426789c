"""The address in a server's output, and what becomes of the output behind it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.first_plot import find_address

ADDRESS = "http://127.0.0.1:8888/lab/tree/a.ipynb?token=abc"


def started(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, text=True)


def test_a_server_with_much_to_say_is_not_blocked() -> None:
    with started(f"print('hello'); print('{ADDRESS}', flush=True); print('line\\n' * 100_000)") as server:
        assert server.stdout is not None
        assert find_address(server.stdout) == ADDRESS
        assert server.wait(20) == 0


def test_a_server_that_ends_early_is_quoted() -> None:
    with started("print('no port is free')") as server:
        assert server.stdout is not None
        with pytest.raises(RuntimeError, match=r"before it printed an address(.|\n)*no port is free"):
            find_address(server.stdout)
