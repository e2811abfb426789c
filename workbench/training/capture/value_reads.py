"""Reads of values in a recorded step: ``x.tolist()``, ``x.numpy()``, ``np.asarray(x)``.

They read memory, not by an operator, so the dispatch mode that records operators does not see them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from workbench.errors import CaptureError
from workbench.transport.user_code import PACKAGE

_READERS = {
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.__array__: "numpy.asarray()",
    torch.Tensor.__dlpack__: "__dlpack__()",
}
_TORCH = f"{Path(torch.__file__).parent}/"
_ON_THE_WAY = (f"{_TORCH}_tensor.py", f"{_TORCH}overrides.py")
"""What lies between the caller and the mode. Others in torch that read (printing) decide nothing."""


class RejectValueReads(TorchFunctionMode):
    """Context in which user code that reads a tensor's values gets an error with the fix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _READERS.get(func)
        if name is not None:
            frame = _caller()
            if frame is not None and not frame.f_code.co_filename.startswith((PACKAGE, _TORCH)):
                reject_value_read(name, frame)
        return func(*args, **(kwargs or {}))


def reject_value_read(name: str, frame: FrameType | None, what: str = "the value of a tensor is read") -> NoReturn:
    """Raise ``CaptureError``: the step reads values by the function ``name``, at this line."""
    where = "" if frame is None else f" ({frame.f_code.co_filename}, line {frame.f_lineno})"
    raise CaptureError(
        f"capture: {name}: {what}{where}. A replay runs the recorded operators and no "
        "Python, so what the code does with values would stay as it was. Return the tensor and read it outside of "
        "the captured function, or decide with torch.where."
    )


def _caller() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _ON_THE_WAY:
        frame = frame.f_back
    return frame
