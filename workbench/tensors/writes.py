"""Counts of the writes to the memory of tensors, where torch's own count leaves some out."""

from __future__ import annotations

from typing import Any

import torch

TensorState = Any
"""A global tensor; ``tensor_state`` imports this module."""


class Writes:
    """The number of writes to one memory, since somebody has first read or set ``.data`` there, through all tensors
    that have it: torch counts those through ``.data`` apart, and none to tensors of inference mode. Reads of ``.data``
    change no number, since a program may look at it on one rank only.
    """

    __slots__ = ("_counting", "_past")

    def __init__(self) -> None:
        self._counting: dict[Any, torch.Tensor] = {}  # by the id of a tensor, or by the place of data in the memory
        self._past = 0

    def add(self, tensor: TensorState, above: int = -1) -> None:
        """Count those to a tensor that has this memory now. ``above``: its version with its memory before."""
        known = self._counting.pop(id(tensor), None)  # its own, or that of one that is no more
        self._past += (0 if known is None else writes_to(known)) - writes_to(tensor)
        self._counting[id(tensor)] = _counter(tensor)
        self._past += max(0, above + 1 - writes_to(tensor) - self.total())
        keep_writes(tensor, self)

    def add_one(self) -> None:
        """Count one that torch does not."""
        self._past += 1

    def counted(self, data: torch.Tensor) -> torch.Tensor:
        """``data``, which torch has just made, as a tensor whose writes count."""
        place = data.shape, data.stride(), data.storage_offset(), data.dtype
        if place not in self._counting:
            self._counting[place] = _counter(data)
        made = self._counting[place].detach()
        _set_data(made, data)
        return made

    def total(self) -> int:
        """The number; it never falls."""
        return self._past + sum(map(writes_to, self._counting.values()))


def writes_to(tensor: torch.Tensor) -> int:
    """The number that torch counts; 0 for tensors of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the count of writes of another one, and without its memory, which has this one in its keeping."""
    with torch.inference_mode(False):
        counter = tensor.detach()
        _set_data(counter, counter.new_empty(0))
    return counter


def keep_writes(tensor: TensorState, writes: Writes) -> None:
    """Let ``writes`` count those to the memory of ``tensor``."""
    if tensor._spec.is_placeholder:
        tensor._writes = writes
    else:
        vars(tensor.untyped_storage())["writes"] = writes


def kept_writes(owner: TensorState) -> Writes | None:
    """What ``keep_writes`` has set, if it has."""
    if owner._spec.is_placeholder:  # its storage is that of others too
        return owner._writes
    kept: Writes | None = vars(owner.untyped_storage()).get("writes")
    return kept


_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
