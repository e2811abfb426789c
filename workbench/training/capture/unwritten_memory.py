"""Memory that a step has made and that no recorded operator has written: a kernel that torch does not know may have."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from workbench.errors import CaptureError
from workbench.tensors.dispatch.placeholder_calls import has_data

_aten = torch.ops.aten
_MAKES_IT = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
_READS_NO_NUMBERS = {
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like, _aten.randint_like,
    _aten.new_zeros, _aten.new_ones, _aten.new_full, *_MAKES_IT,
}  # fmt: skip
"""Operators that read the shape and dtype of their operand."""


class UnwrittenMemory:
    """Follows a recording. Functions of no operator, such as exchanges, may write to all that they get."""

    def __init__(self) -> None:
        self._found: set[int] = set()  # of storages; the recorder keeps their addresses from others

    def add(self, operator: Any, given: Any, written: Any, out: Any, makes_view: bool) -> None:
        """Follow an operator.

        Args:
            given: its arguments.
            written: those among them that it writes to.
            out: its result.

        Raises:
            CaptureError: it reads such memory.
        """
        self.write(written)
        packet = operator.overloadpacket
        if packet in _MAKES_IT and not written and out.numel() and has_data(out):
            self._found.add(_memory_of(out))
        elif not makes_view and packet not in _READS_NO_NUMBERS:
            self.check(str(operator).removesuffix(".default"), given)

    def write(self, values: Any) -> None:
        """Tensors among these values have been written to."""
        if self._found:
            self._found -= {_memory_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}

    def check(self, reader: str, values: Any) -> None:
        """Raise ``CaptureError`` if one of these values lies in such memory; ``reader`` reads it."""
        for leaf in tree_leaves(values) if self._found else ():
            if isinstance(leaf, torch.Tensor) and _memory_of(leaf) in self._found:
                raise CaptureError(
                    f"capture: {reader} reads a tensor of shape {tuple(leaf.shape)} that torch.empty or its like has "
                    "made and no operator of torch has written. If a kernel has (Triton's kernel[grid](...), a direct "
                    "call of an extension), a replay would not run it. Make it an operator, by torch.library.triton_op "
                    "or torch.library.custom_op. If nothing has, take torch.zeros."
                )


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
