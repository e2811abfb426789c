"""Memory of one rank by kind over one step, and the snapshot of its allocator."""

from __future__ import annotations

import pickle
import time
from contextlib import ExitStack

import torch
from torch.optim import Optimizer

from workbench.core.profile import MEMORY_KINDS, MemoryCurve
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.world import World
from workbench.training.capture.gradients import held_grad
from workbench.training.diagnostics.boxing_trace import BoxingTrace
from workbench.training.diagnostics.memory import ActivationMeter, optimizer_state, storage_bytes

_SAMPLES_PER_STEP = 200
_MOST_ENTRIES = 100_000
"""Of the allocator's history."""


class MemoryMeter:
    """Samples a rank's memory between ``start`` and ``stop``, whenever autograd saves or releases a tensor and some
    time has passed. That takes time, so the step is better not one whose time is measured.

    Parameters and gradients are those of the optimizer. On a GPU, "other" is what its allocator holds beyond the other
    kinds.

    Args:
        world: of the rank.
        optimizer: of the step, between two of its steps.
        step_s: roughly the seconds of a step.

    Attributes:
        snapshot: of a GPU's allocator after the step, with its history in it, as torch's own viewer reads it. Empty
            elsewhere.
    """

    def __init__(self, world: World, optimizer: Optimizer, step_s: float) -> None:
        self.world, self._optimizer = world, optimizer
        self._parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._activations = ActivationMeter(parameters=self._parameters, on_change=self.sample_if_due)
        self._every_s = step_s / _SAMPLES_PER_STEP
        self._times_s: list[float] = []
        self._sizes: list[list[int]] = []
        self._around, self._is_over = ExitStack(), False
        self.snapshot = b""

    def start(self) -> None:
        """Begin; a captured step runs normally, as under a trace of its boxings."""
        context = self.world.context
        self._around.enter_context(self._activations.measure())
        self._around.enter_context(context.temporarily(tracer=BoxingTrace(self.world, outer=context.tracer)))
        if self.world.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ENTRIES)
        self.sample()

    def stop(self) -> None:
        """End; safe to call twice."""
        if not self._is_over:
            self.sample()
            self._is_over = True
            self._around.close()
            if self.world.device.type == "cuda":
                self.snapshot = pickle.dumps(torch.cuda.memory._snapshot())
                torch.cuda.memory._record_memory_history(enabled=None)

    def sample_if_due(self) -> None:
        """Sample if some time has passed."""
        if time.perf_counter() - self._times_s[-1] >= self._every_s:
            self.sample()

    def sample(self) -> None:
        """Take the sizes of all kinds now."""
        if self._is_over:
            return
        with local_torch():
            grads = [grad for p in self._parameters if (grad := held_grad(p)) is not None]
        seen: set[int] = set()
        sizes = [
            storage_bytes(self._parameters, seen),
            storage_bytes(grads, seen),
            storage_bytes(optimizer_state(self._optimizer), seen),
            self._activations.held_bytes,
        ]
        if self.world.device.type == "cuda":
            sizes.append(max(0, torch.cuda.memory_allocated(self.world.device) - sum(sizes)))
        self._times_s.append(time.perf_counter())
        self._sizes.append(sizes)

    def curve(self) -> MemoryCurve:
        """The samples."""
        kinds = zip(MEMORY_KINDS, zip(*self._sizes, strict=True), strict=False)
        times_s = tuple(time_s - self._times_s[0] for time_s in self._times_s)
        return MemoryCurve(self.world.rank, times_s, {kind: tuple(sizes) for kind, sizes in kinds})
