"""The steps of a run that compiles them: as they are, recorded, compiled; as they are where that is impossible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from workbench.errors import CaptureError
from workbench.tensors.global_tensor import local_torch, plain
from workbench.tensors.world import current
from workbench.training.capture.compiled import Tell
from workbench.training.capture.replay_options import ReplayOptions
from workbench.training.capture.step import CapturedStep
from workbench.training.gradients.nested_steps import distinct, state_tensors

_MOST_RECORDINGS = 8
_NEVER = (
    "no step was compiled: that takes three steps with the same shapes and the same weights of micro-batches, which "
    "count= changes from step to step"
)


class CompiledSteps:
    """A training step whose first call runs it, whose second records it, and whose third compiles it.

    A step that cannot be recorded is taken again as it is, from the state before, and so are all later ones.

    Args:
        step: the step, of tensors and other values.
        model, optimizer: what it changes.
        generator: the one that it draws from.
        tell: is called before a program is compiled, with its number and how many there are.

    Attributes:
        problem: why the step, or a part of it, is not compiled; empty if it is, or may be.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        optimizer: Optimizer,
        generator: torch.Generator,
        tell: Tell | None = None,
    ) -> None:
        backend = "inductor+cudagraphs" if current().device.type == "cuda" else "inductor"
        self._captured = CapturedStep(step, _MOST_RECORDINGS, ReplayOptions(backend, tell=tell))
        self._step, self._is_refused = step, False
        self._model, self._optimizer, self._generator = model, optimizer, generator
        self._has_run = False
        self.problem = ""

    @property
    def compiles_next(self) -> bool:
        """Whether the next call compiles, for the first time."""
        return not self._is_refused and (self._captured.num_recordings, self._captured.num_replays) == (1, 0)

    @property
    def reason(self) -> str:
        """Why steps so far are not compiled: `problem`, or none has come often enough; empty if some are."""
        return self.problem or _NEVER * (self._captured.num_replays == 0)

    def __call__(self, *args: Any) -> Any:
        """Take the step."""
        if self._is_refused:
            return self._step(*args)
        if self._captured.num_recordings or not self._has_run:
            self._has_run = True
            made = self._captured(*args)
            self.problem = self._captured.problem
            return made
        before, random = [(tensor, tensor.clone()) for tensor in self._tensors()], self._generator.get_state()
        states = [(each.state, _copied(each.state)) for each in distinct(self._optimizer)]
        try:
            return self._captured(*args)
        except CaptureError as error:
            self._is_refused, self.problem = True, str(error)
        self._optimizer.state.values()  # waits for copies to host memory that the refused step has begun
        with torch.no_grad(), local_torch():
            for tensor, value in before:
                tensor.copy_(value)
        for state, kept in states:
            state.clear()
            state.update(kept)
        self._generator.set_state(random)
        return self._step(*args)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """The local tensors of the model and of its optimizer."""
        values = [*self._model.parameters(), *self._model.buffers()]
        values += state_tensors(self._optimizer)
        with torch.no_grad(), local_torch():
            yield from (plain(value) for value in values)


def _copied(state: Any) -> dict[Any, Any]:
    """New dictionaries and lists, with the same tensors and numbers."""
    return {key: tree_map(lambda leaf: leaf, values) for key, values in state.items()}
