"""The checks of ``workbench doctor``. Each looks at one thing and says how to repair it."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from workbench.core.cores import num_cores
from workbench.core.extras import install_command, packages_of
from workbench.units import format_bytes, format_count, format_seconds

GOOD, WARNING, BAD = "ok", "warn", "FAIL"
_MIN_MEMORY_BYTES = 2e9
"""Bytes that two engines with torch and a notebook need, roughly."""


@dataclass(frozen=True)
class Finding:
    """The result of a check: its state, a text, and the fix if there is one."""

    what: str
    state: str
    text: str
    fix: str = ""


def check_python() -> Finding:
    """The interpreter's version and build. An interpreter that is too old cannot load this file."""
    text = f"{platform.python_version()} at {sys.executable}"
    if os.name == "nt":
        return Finding("python", BAD, f"{text}, on Windows", "Engines need Linux or macOS: install it in WSL 2.")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        fix = "Nobody has tried the workbench without the GIL: take the other build, python3.13 for python3.13t."
        return Finding("python", WARNING, f"{text}, a free-threaded build", fix)
    return Finding("python", GOOD, text)


def check_package(name: str, extra: str = "") -> Finding:
    """Whether a package is installed, in a version that fits. Without ``extra`` the workbench requires it."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, WARNING if extra else BAD, "not installed", install_command(extra, name))
    with suppress(ImportError):
        from packaging.requirements import Requirement  # comes with ipykernel

        for wanted in packages_of(extra, name):
            if not Requirement(wanted).specifier.contains(found, prereleases=True):
                text = f"{found}, but the workbench asks for {wanted}"
                return Finding(name, WARNING, text, install_command(extra, name))
    return Finding(name, GOOD, found)


def check_machine() -> Finding:
    """Cores and memory."""
    import psutil

    from workbench.session.host_transport import available_memory

    memory = psutil.virtual_memory()
    available = available_memory() if has_module("torch") else memory.available
    text = (
        f"{format_count(num_cores())} cores, {format_bytes(memory.total)} memory, {format_bytes(available)} of it free"
    )
    if available < _MIN_MEMORY_BYTES:
        need = format_bytes(_MIN_MEMORY_BYTES)
        return Finding("machine", WARNING, text, f"2 engines need about {need}; close something, or use --engines 1.")
    return Finding("machine", GOOD, text)


def check_gpus() -> Finding:
    """The GPUs that torch can use, and those that it cannot."""
    import torch

    from workbench.session.processes.gpus import find_gpus

    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        text = ", ".join(f"{gpu.name} with {format_bytes(gpu.total_memory)}" for gpu in gpus)
        return Finding("gpus", GOOD, f"{text}; CUDA {torch.version.cuda}")
    names, why_not = find_gpus()
    if names or why_not:
        what = why_not or f"nvidia-smi lists {len(names)}, but torch {torch.__version__} cannot use them"
        fix = "Install torch for your driver's CUDA version: make clean, then make install TORCH_INDEX=<its index>"
        if why_not.startswith("nvidia-smi"):
            fix = "nvidia-smi must list the GPUs first. After an update of the driver, restart the machine."
        return Finding("gpus", WARNING, f"{what}; engines run on the CPU", fix)
    return Finding("gpus", GOOD, "none; engines run on the CPU")


def check_backends() -> Finding:
    """The backends of torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("backends", BAD, "torch has no gloo", "Install an official build of torch.")
    names = ["gloo", *(["nccl"] if dist.is_nccl_available() else [])]
    return Finding("backends", GOOD, ", ".join(names))


def check_transport() -> Finding:
    """The transport between CPU ranks of this host."""
    from workbench.errors import WorldError
    from workbench.session.host_transport import host_transport

    try:
        text, refusal = host_transport()
    except WorldError as error:
        return Finding("transport", BAD, str(error), "Unset the variable, or give it one of the values named.")
    if refusal:
        fix = "CPU ranks of this host use gloo, which is slower. What is named is what shared memory lacks."
        return Finding("transport", WARNING, f"no shared memory: {refusal}", fix)
    return Finding("transport", GOOD, text)


def check_loopback() -> Finding:
    """Whether a process can connect to another one on this machine; engines need it."""
    try:
        works = _loopback_carries(b"x")
    except OSError as error:
        fix = "Allow connections to 127.0.0.1: look at the firewall, or at the sandbox this runs in."
        return Finding("loopback", BAD, f"no connection over 127.0.0.1: {error}", fix)
    return Finding("loopback", GOOD if works else BAD, "127.0.0.1 can be reached")


def check_engine() -> Finding:
    """Whether an engine starts, joins a world and answers."""
    from workbench.errors import WorkbenchError
    from workbench.session.cluster import Session

    started_s = time.monotonic()
    try:
        with Session(engines=1, device="cpu") as session:
            answer = session.run("wb.world_size()", timeout=30).values
    except (WorkbenchError, OSError) as error:
        return Finding(
            "engine", BAD, str(error), "Free what the checks above name; the engine's own last lines say more."
        )
    if answer != [1]:
        return Finding("engine", BAD, f"world size {answer} instead of [1]", "Is RANK or WORLD_SIZE set by hand?")
    return Finding("engine", GOOD, f"started, answered and ended in {format_seconds(time.monotonic() - started_s)}")


def _loopback_carries(message: bytes) -> bool:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=2) as near,
    ):
        far, _ = server.accept()
        with far:
            near.sendall(message)
            far.settimeout(2)
            return far.recv(len(message)) == message


def has_module(name: str) -> bool:
    """Whether a module can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None
