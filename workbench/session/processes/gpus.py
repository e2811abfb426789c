"""Which GPUs engines can use, by what nvidia-smi and torch's files say. Nothing here loads CUDA or torch.

``CUDA_VISIBLE_DEVICES`` of an engine takes a number, or the UUID of a GPU or of a slice of one (MIG). A process sees
one slice only, so slices are listed one by one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from workbench.errors import SessionError

_TIMEOUT_S = 20
_GPU = re.compile(r"GPU (\d+):")
_SLICE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")
_NAME = re.compile(r"\d+$|GPU-|MIG-")
_CUDA_OF_DRIVER = re.compile(r"CUDA (?:UMD )?Version: *(\d+)\.(\d+)")
NO_GPU = ("No devices", "No GPU")
"""What nvidia-smi says first where there is none."""


class FoundGpus(NamedTuple):
    """CUDA's names of the GPUs and slices that engines can use. ``why_not`` says why there are none although the
    machine or the environment names some; empty where it names none.
    """

    names: tuple[str, ...]
    why_not: str = ""


def find_gpus() -> FoundGpus:
    """The GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` allows, if this torch can use them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and not _visible(chosen):
        return FoundGpus(())
    if shutil.which("nvidia-smi") is None:  # as in some containers, which say what they have
        why_not = "" if chosen is None else _unusable(_cuda_of_torch(), "")
        return FoundGpus(() if chosen is None or why_not else _visible(chosen), why_not)
    listing = _nvidia_smi("-L")
    named = _named(listing.stdout)
    if listing.returncode or not named:
        lines = (line for line in (listing.stdout + listing.stderr).strip().splitlines() if not _is_listed(line))
        said = next(lines, f"exit status {listing.returncode}")
        return FoundGpus((), "" if said.startswith(NO_GPU) else f"nvidia-smi: {said}")
    why_not = _unusable(_cuda_of_torch(), _nvidia_smi().stdout)
    return FoundGpus((), why_not) if why_not else FoundGpus(named if chosen is None else _visible(chosen))


def choose_gpus(device: str) -> list[str]:
    """The GPUs of a session's engines; none for engines on the CPU."""
    check_device(device)
    if device == "cpu":
        return []
    gpus, why_not = find_gpus()
    if device == "cuda" and not gpus:
        raise SessionError(
            f"Session(device='cuda'): 0 GPUs found ({why_not or 'nvidia-smi and CUDA_VISIBLE_DEVICES'}), at least 1 is "
            "needed. Use device='cpu', or device='auto', which takes GPUs if there are any."
        )
    if why_not:
        print(f"workbench: the engines work on the CPU: {why_not}", file=sys.stderr)
    return list(gpus)


def check_device(device: str) -> None:
    """Raise ``SessionError`` for a device that no session has."""
    if device not in ("auto", "cpu", "cuda"):
        raise SessionError(f"Session(device={device!r}): the device is 'auto', 'cpu' or 'cuda'.")


def check_num_engines(engines: int, asked: str) -> None:
    """Raise ``SessionError`` if this is no number of engines; ``asked`` is the call."""
    if not isinstance(engines, int) or isinstance(engines, bool) or engines < 1:
        raise SessionError(f"{asked}: a session has 1 or more engines, e.g. engines=2.")


def _nvidia_smi(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _visible(chosen: str) -> tuple[str, ...]:
    """The names in ``CUDA_VISIBLE_DEVICES``. CUDA ignores those from the first one on that names no GPU, such as -1, or
    Slurm's ``NoDevFiles``.
    """
    return tuple(takewhile(_NAME.match, (name.strip() for name in chosen.split(","))))


def _named(listing: str) -> tuple[str, ...]:
    """The number of each GPU of ``nvidia-smi -L``, or the UUIDs of its slices if it has some."""
    found: list[tuple[str, list[str]]] = []
    for line in listing.splitlines():
        if gpu := _GPU.match(line):
            found.append((gpu[1], []))
        elif found and (part := _SLICE.match(line)):
            found[-1][1].append(part[1])
    return tuple(name for number, slices in found for name in slices or [number])


def _is_listed(line: str) -> bool:
    """Whether a line of ``nvidia-smi -L`` names a GPU or a slice; other lines say what is wrong."""
    return bool(_GPU.match(line) or _SLICE.match(line))


def _cuda_of_torch() -> str | None:
    """The CUDA version that torch was built with, from its file; None for a torch that knows CPUs only."""
    spec = importlib.util.find_spec("torch")
    origin = spec.origin if spec is not None else None
    assert origin is not None
    version: str | None = runpy.run_path(str(Path(origin).with_name("version.py"))).get("cuda")
    return version


def _unusable(cuda_of_torch: str | None, overview: str) -> str:
    """Why torch cannot use the GPUs of a driver, from what ``nvidia-smi`` prints; empty if it can.

    A driver serves programs of its own major version of CUDA and of older ones.
    """
    if cuda_of_torch is None:
        return "the installed torch is for CPUs only"
    driver = _CUDA_OF_DRIVER.search(overview)
    if driver is not None and int(driver[1]) < int(cuda_of_torch.split(".")[0]):
        return f"the driver is for CUDA {driver[1]}.{driver[2]}, and the installed torch needs {cuda_of_torch}"
    return ""
