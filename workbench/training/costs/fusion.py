"""What functions read and write if neighbours are one program, as in a compiled step.

Functions one after the other between two matrix products run together: a result that only they read is never written,
and a tensor that several of them read is read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from workbench.training.costs.layer_calls import Entry


@dataclass(eq=False)
class _Result:
    """A tensor that a program has made, and not written as long as nobody else reads it."""

    maker: Entry
    is_backward: bool
    program: int
    size_bytes: float
    is_written: bool = False
    is_read: bool = False


@dataclass
class Fusion:
    """Counts the functions of one forward and backward, in their order."""

    _program: int = 0
    _results: dict[int, _Result] = field(default_factory=dict)  # by address
    _taken: set[int] = field(default_factory=set)  # addresses that the present program has read
    _held: list[torch.UntypedStorage] = field(default_factory=list)  # so that addresses stay theirs

    def record_product(self, inputs: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor]) -> None:
        """A matrix product ends the program before it, and reads what that has written."""
        self._program += 1
        self._taken.clear()
        for address in inputs:
            self._write(address)
        for address, tensor in outputs.items():
            self._results.pop(address, None)
            self._held.append(tensor.untyped_storage())

    def record(
        self,
        entry: Entry,
        is_backward: bool,
        reads: Mapping[int, float],
        makes: Mapping[int, tuple[float, torch.Tensor]],
    ) -> None:
        """A function that only moves memory.

        Args:
            entry: where its bytes are counted, in forward or backward.
            is_backward: which of both.
            reads, makes: bytes of its operands and results, by address; 0 for those that do not count.
        """
        for address, size in reads.items():
            made = self._results.get(address)
            if made is not None and made.program == self._program:
                made.is_read = True
                continue
            self._write(address)
            if address not in self._taken:
                self._taken.add(address)
                entry.add_fused(size, is_backward)
        for address, (size, tensor) in makes.items():
            self._results[address] = _Result(entry, is_backward, self._program, size)
            self._held.append(tensor.untyped_storage())

    def end(self) -> None:
        """Write what nobody has read: it is a result of the step."""
        for address, made in self._results.items():
            if not made.is_read:
                self._write(address)

    def _write(self, address: int) -> None:
        made = self._results.get(address)
        if made is not None and not made.is_written:
            made.is_written = True
            made.maker.add_fused(made.size_bytes, made.is_backward)
