"""The states of a program that a rank runs once for each of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.tensors.program_state import ProgramState


class StageStates:
    """The states of several stages of one rank. Each stage runs all micro-batches, and goes on from what it has left.

    A program that has changed nothing before the rank's first change of stages keeps one state for all of them.

    Args:
        objects, device, tensors, code: as for ``ProgramState``.
    """

    def __init__(
        self, objects: Sequence[Any], device: torch.device, tensors: Sequence[torch.Tensor], code: Sequence[Any]
    ) -> None:
        self._of = objects, device, tensors, code
        self._stage: int | None = None
        self._left: dict[int, ProgramState] = {}
        self._changes: bool | None = None

    def go_on_as(self, stage: int) -> None:
        """Let the program go on from the state of this stage."""
        if self._stage is None:
            self._stage, self._first = stage, ProgramState(*self._of)
        if stage == self._stage or self._changes is False:
            return
        if self._changes is None:
            self._changes = not self._first.is_unchanged()
        if self._changes:
            self._left[self._stage] = ProgramState(*self._of)
            self._left.get(stage, self._first).put_back()
            self._stage = stage
