"""Runs commands on other hosts by the user's own ``ssh``, which never asks for a password here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_CONNECT_TIMEOUT_S = 4
_OPTIONS = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=5"]
"""Those of the user come first, and win."""
_Result = TypeVar("_Result")


def command_to(ssh: Sequence[str], host: str) -> list[str]:
    """The command that reaches a host: ``b``, ``user@b`` or ``user@b:22``."""
    name, _, port = host.partition(":")
    return [*ssh, *_OPTIONS, *(["-p", port] if port else []), name]


def run_on(
    ssh: Sequence[str], host: str, command: str, stdin: str = "", timeout_s: float = 30.0
) -> subprocess.CompletedProcess[str]:
    """Run a line of shell on a host. A host that does not answer gives ssh's return code, 255."""
    whole = [*command_to(ssh, host), command]
    try:
        return subprocess.run(
            whole, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(whole, 255, "", f"no answer within {timeout_s:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(whole, 255, "", str(error))


def why_silent(ssh: Sequence[str], host: str) -> str:
    """Why a host does not answer, in ssh's words; empty if it does."""
    said = run_on(ssh, host, "exit 0", timeout_s=2.0 * _CONNECT_TIMEOUT_S)
    lines = said.stderr.strip().splitlines()
    return "" if said.returncode != 255 else (lines[-1] if lines else "ssh ended with 255")


def ask_all(hosts: Sequence[str], ask: Callable[[str], _Result]) -> dict[str, _Result]:
    """The answers of all hosts, which are asked at the same time."""
    with ThreadPoolExecutor(max(1, len(hosts)), "workbench-ssh") as pool:
        return dict(zip(hosts, pool.map(ask, hosts), strict=True))
