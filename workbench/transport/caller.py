"""The line of the user's code that is running: what traces and error texts point at."""

from __future__ import annotations

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
    """The innermost frame that is neither torch's, ours nor the standard library's, and our frames inside it.

    None where no user's code is running: in a thread of autograd, or of simulated ranks that run one of our functions.
    """
    # Without the caller's own frame: a list in its locals that held it would keep all tensors of the call alive.
    frame: FrameType | None = sys._getframe(2)
    ours = []
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(PACKAGE):
            ours.append(frame)
        frame = frame.f_back
    return frame, ours


def _is_machinery(file: str) -> bool:
    if file.startswith((PACKAGE, _TORCH, "<frozen", "<string>")):
        return True
    return file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file


def name_in_user_code(value: Any, default: str) -> str:
    """The variable under which the user's running function knows ``value``; ``default`` where it has none."""
    frame, _ = user_frame()
    if frame is None:
        return default
    return next((name for name, other in frame.f_locals.items() if other is value), default)
