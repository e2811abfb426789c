"""The running line of the user's code, for traces and error texts."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

import torch

PACKAGE = f"{Path(__file__).parent.parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + "/"


def user_frame() -> tuple[FrameType | None, list[FrameType]]:
    """The innermost frame of user code (not torch, this package or the standard library), and our frames inside it.

    None where no user code is running: in a thread of autograd, or of simulated ranks that run a function of ours.
    """
    # Skip the caller's own frame: a list in its locals that held it would keep all tensors of the call alive.
    frame: FrameType | None = sys._getframe(2)
    ours = []
    while frame is not None and _is_library_code(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(PACKAGE):
            ours.append(frame)
        frame = frame.f_back
    return frame, ours


def user_stacklevel() -> int:
    """The ``stacklevel`` with which the caller's warning names the innermost line of user code."""
    frame, level = sys._getframe(1), 1
    while _is_library_code(frame.f_code.co_filename) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def _is_library_code(file: str) -> bool:
    if file.startswith((PACKAGE, _TORCH, "<frozen", "<string>")):
        return True
    return file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file


def name_in_user_code(value: Any, default: str) -> str:
    """The name of the variable that holds ``value`` in the user's running function; ``default`` if there is none."""
    frame, _ = user_frame()
    if frame is None:
        return default
    return next((name for name, other in frame.f_locals.items() if other is value), default)


def user_location() -> str:
    """`` at train.py:12``: the line of the user's code that is running; empty where none is."""
    frame, _ = user_frame()
    return f" at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""
