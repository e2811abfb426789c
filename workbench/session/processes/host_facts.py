"""What other hosts are, asked over ssh by a short program: Python, packages, GPUs, clock, network; and why not."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import SessionError
from workbench.session.processes import ssh
from workbench.session.processes.gpus import NO_GPU

PACKAGES = ("workbench", "torch", "ipyparallel", "ipykernel")
_TIMEOUT_S = 30.0
_IPV4 = ["-o", "AddressFamily=inet"]
"""ssh prefers IPv6 where it can. Engines connect to the addresses of this connection, by IPv4."""
# Any Python 3 runs it. It connects back to this machine, as engines will.
_PROGRAM = """
import json, os, platform, socket, subprocess, sys, time
facts = {"time_s": time.time(), "python": platform.python_version(), "host": socket.gethostname()}
facts["connection"] = os.environ.get("SSH_CONNECTION", "")
try:
    from importlib.metadata import version
except ImportError:
    version = None
facts.update(packages={}, gpus=[], gpu_problem="")
for name in sys.argv[2:]:
    try:
        facts["packages"][name] = version(name)
    except Exception:
        pass
try:
    listing = subprocess.check_output(["nvidia-smi", "-L"], stderr=subprocess.STDOUT)
    facts["gpus"] = [line for line in listing.decode("utf8", "replace").splitlines() if line.startswith("GPU ")]
except OSError:  # there is no such program
    pass
except subprocess.CalledProcessError as error:
    facts["gpu_problem"] = (error.output.decode("utf8", "replace").strip() or str(error)).splitlines()[0]
try:
    import psutil
    own = facts["connection"].split()[2]
    found = [n for n, each in psutil.net_if_addrs().items() if any(a.address == own for a in each)]
    facts["interface"] = found[0] if found else ""
except Exception:
    facts["interface"] = ""
try:
    there = socket.create_connection((facts["connection"].split()[0], int(sys.argv[1])), 5)
    there.close()
    facts["back"] = ""
except Exception as error:
    facts["back"] = str(error) or type(error).__name__
probe = socket.socket()
probe.bind(("", 0))
facts["port"] = probe.getsockname()[1]
print("facts:" + json.dumps(facts))
"""
_FIXES = {
    "Permission denied": "Let your key in: ssh-copy-id {host}",
    "Host key verification failed": "Accept its key once by hand: ssh {host}",
    "IDENTIFICATION HAS CHANGED": "If the host was set up anew: ssh-keygen -R {host}, then ssh {host}",
    "resolve hostname": "Correct the name, or add it with an IPv4 address to ~/.ssh/config or /etc/hosts",
    "Connection refused": "Start sshd there, or name its port: {host}:PORT",
    "timed out": "Is it on, and does a firewall let port 22 through? Try: ssh {host}",
    "No route to host": "Is it on, and in this network? Try: ssh {host}",
    "no answer within": "Its shell does not end, or the host hangs. Try: ssh {host} true",
}


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host has said; ``problem`` and ``fix`` if it cannot run engines.

    Attributes:
        gpu_problem: what nvidia-smi said in place of a list; empty if it made one, or does not exist.
        back: why it could not connect to this machine; empty if it could.
        clock_s: how far its clock is ahead of the one here, and ``clock_error_s`` the error of this number.
        here: this machine's address as the host sees it.
        address, interface: the host's own address and interface on the way from here.
        port: one that is free there.
    """

    host: str
    problem: str = ""
    fix: str = ""
    name: str = ""
    python: str = ""
    packages: tuple[tuple[str, str], ...] = ()
    gpus: tuple[str, ...] = ()
    gpu_problem: str = ""
    back: str = ""
    clock_s: float = 0.0
    clock_error_s: float = 0.0
    here: str = ""
    address: str = ""
    interface: str = ""
    port: int = 0


def parse_hosts(text: str, asked: str) -> list[str]:
    """The hosts of an option: ``"a,b"``, ``"me@a,me@b:2222"``.

    Raises:
        SessionError: none is named, one is named twice, or a name cannot be.
    """
    hosts = [host.strip() for host in text.split(",") if host.strip()]
    twice = [host for host, number in Counter(hosts).items() if number > 1]
    wrong = [host for host in hosts if host.startswith("-") or len(host.split()) > 1 or not _has_port(host)]
    mistakes = [f"{host} is named twice" for host in twice]
    mistakes += [f"{host!r} is no host" for host in wrong] + ([] if hosts else ["no host is named"])
    if mistakes:
        raise SessionError(
            f"{asked}: {'; '.join(mistakes)}. Name each host once, as ssh knows it, with commas between: a,me@b,c:2222"
        )
    return hosts


def ask_hosts(hosts: Sequence[str], python: str = "", command: Sequence[str] = ("ssh",)) -> list[HostFacts]:
    """Ask all hosts at the same time.

    Args:
        python: the interpreter there; default: the path of the one here.
        command: ssh with its options.
    """
    with socket.create_server(("", 0), backlog=len(hosts)) as server:  # the kernel answers, so nothing accepts
        port = str(server.getsockname()[1])
        found = ssh.ask_all(hosts, lambda host: _ask(command, host, python or sys.executable, port))
    return list(found.values())


def _ask(command: Sequence[str], host: str, python: str, port: str) -> HostFacts:
    line = shlex.join([python, "-", port, *PACKAGES])
    sent_s = time.time()
    said = ssh.run_on([*command, *_IPV4], host, line, stdin=_PROGRAM, timeout_s=_TIMEOUT_S)
    took_s = time.time() - sent_s
    facts = next((row for row in said.stdout.splitlines() if row.startswith("facts:")), None)
    lines = said.stderr.strip().splitlines()
    if facts is not None:
        return _read(host, json.loads(facts.removeprefix("facts:")), sent_s, took_s)
    if said.returncode == 255:
        text = next(
            (row for row in lines if any(known in row for known in _FIXES)), lines[-1] if lines else "no answer"
        )
        fix = next((fix for known, fix in _FIXES.items() if known in text), "Try by hand: ssh {host}")
        return HostFacts(host, f"ssh: {text.strip()}", fix.format(host=host))
    if said.returncode in (126, 127):
        return HostFacts(
            host,
            f"no Python at {python}",
            "Install the environment of this machine there, at the same path, or name another: --python PATH",
        )
    why = lines[-1] if lines else f"exit status {said.returncode}"
    return HostFacts(host, f"{python} does not run: {why}", f"Try by hand: ssh {host} {python} --version")


def _read(host: str, facts: dict[str, Any], sent_s: float, took_s: float) -> HostFacts:
    ends = (facts["connection"].split() + [""] * 4)[:4]
    return HostFacts(
        host,
        name=facts["host"],
        python=facts["python"],
        packages=tuple(sorted(facts["packages"].items())),
        gpus=tuple(facts["gpus"]),
        gpu_problem="" if facts["gpu_problem"].startswith(NO_GPU) else facts["gpu_problem"],
        back=facts["back"],
        clock_s=facts["time_s"] - (sent_s + took_s / 2),
        clock_error_s=took_s / 2,
        here=ends[0],
        address=ends[2],
        interface=facts["interface"],
        port=facts["port"],
    )


def _has_port(host: str) -> bool:
    name, colon, port = host.partition(":")
    return bool(name) and (not colon or port.isdecimal())
