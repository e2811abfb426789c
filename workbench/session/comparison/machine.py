"""Describes the machine and the versions in words: runs depend on them besides their strategy."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def machine_text() -> str:
    """This machine in one line: processor, cores, operating system."""
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def versions() -> dict[str, str]:
    """Versions of the packages on which the numbers depend, by name."""
    ours = sys.modules[__name__.partition(".")[0]].__version__  # the package itself is above all rooms
    return {"workbench": ours, "torch": str(torch.__version__), "Python": platform.python_version()}


def versions_text(settings: Mapping[str, Any]) -> str:
    """The versions that a run's settings have, in one line: ``workbench 0.2.0, torch 2.13.0, Python 3.12.1``."""
    known = ((name, settings.get(name.lower())) for name in versions())
    return ", ".join(f"{name} {number}" for name, number in known if number)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
