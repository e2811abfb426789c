"""What a recording asks about an operator of torch: what it writes to, whether it draws, whether it reads values."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from workbench.errors import CaptureError
from workbench.transport.user_code import PACKAGE, user_frame

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
        "the captured function, or decide with torch.where. Distributions of torch do not read after "
        "Distribution.set_default_validate_args(False)."
    )


def _caller() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _ON_THE_WAY:
        frame = frame.f_back
    return frame


_aten = torch.ops.aten
_STATISTICS = ("running_mean", "running_var")
_WRITES_STATISTICS = {
    _aten.native_batch_norm, _aten.cudnn_batch_norm, _aten.miopen_batch_norm, _aten.batch_norm_update_stats,
    _aten.batch_norm_gather_stats, _aten.batch_norm_gather_stats_with_counts,
}  # fmt: skip
"""Operators that write to their statistics in training, which their schemas do not say."""


def written_arguments(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to, tensors or lists of these, in whatever form they are given."""
    given = _by_name(operator, args, kwargs)
    written = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if operator._overloadpacket in _WRITES_STATISTICS and given.get("training", True):
        written += _STATISTICS
    return [given[name] for name in written if given.get(name) is not None]


def draws(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers. Attention does if it drops some of its weights."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    given = _by_name(operator, args, kwargs)
    has_share = any(argument.name == "dropout_p" for argument in operator._schema.arguments)
    return bool(given.get("dropout_p", not has_share))


def check_operator(operator: Any, args: Any) -> None:
    """Raise ``CaptureError`` for an operator that hands a value to Python, or makes a shape of values."""
    reads = torch.Tag.data_dependent_output in operator.tags
    if not reads and torch.Tag.dynamic_output_shape not in operator.tags:
        return
    is_index = operator is _aten.index.Tensor
    if is_index and not any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
        return  # only a mask makes the result's shape depend on values
    frame, _ = user_frame()
    name = "item(), bool(), int() or float()" if operator is _aten._local_scalar_dense.default else str(operator)
    reject_value_read(
        name.removesuffix(".default"),
        frame,
        "the value of a tensor is read" if reads else "the shape of a result depends on values",
    )


def devices_of(*values: Any) -> frozenset[str]:
    """The types of devices of the tensors among these values."""
    return frozenset(leaf.device.type for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _by_name(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in operator._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs
