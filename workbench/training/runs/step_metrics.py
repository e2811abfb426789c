"""Steps of all ranks, collected in one exchange about three times a second.

One all-gather carries every rank's measurements of its last steps, and the other values on which the ranks must agree
at that moment. So all ranks have all of them, rank 0 alone reports, and no rank waits at any other step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from workbench.core.metrics import DEVICE_KINDS, MEMORY_KINDS, StepBlock
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.world import World
from workbench.transport.traffic import Interval, Moment

INTERVAL_S = 0.3
"""Seconds between two exchanges if steps are shorter. An exchange costs every rank most of a millisecond, and reports
pass through two more processes."""
_MOST_STEPS = 1000
_KINDS = (*MEMORY_KINDS, "peak")
_MEMORY = 1 + len(_KINDS)
_HEADER = _MEMORY + len(DEVICE_KINDS)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of this rank, between two of its moments."""

    samples: int
    start: Moment
    stop: Moment


class StepCollector:
    """Keeps this rank's steps until they are due. ``add`` every step. When ``is_due``, all ranks call ``collect``.

    Args:
        world: the ranks that take the steps together.
        num_steps: the number of planned steps; 0 if unknown.
    """

    def __init__(self, world: World, num_steps: int = 0) -> None:
        self.world, self.num_steps = world, num_steps
        self.interval = 1  # steps between two exchanges, the same on all ranks
        self._first_step = 0
        self._steps: list[MeasuredStep] = []
        self._losses: list[Any] = []

    def add(self, step: MeasuredStep, loss: Any = None) -> None:
        """Record a step. ``loss`` is a number or a scalar tensor, which stays on its device until ``collect``."""
        self._steps.append(step)
        self._losses.append(loss)

    @property
    def is_due(self) -> bool:
        """Whether it is time to exchange. All ranks have the same answer."""
        return len(self._steps) >= self.interval

    def collect(
        self, memory: dict[str, int] | None = None, number: float = 0.0, device: dict[str, float] | None = None
    ) -> tuple[StepBlock, list[float]]:
        """The steps since the last call as all ranks saw them, and every rank's ``number``. All ranks call it.

        ``memory`` and ``device`` are this rank's (``MEMORY_KINDS``, ``DEVICE_KINDS``).
        """
        losses = _fetched(self._losses)
        rows = self._exchange(memory or {}, device or {}, number)
        steps = [row[_HEADER:] for row in rows]
        times = tuple(tuple(row[0::3]) for row in steps)
        block = StepBlock(
            first_step=self._first_step,
            samples=tuple(step.samples for step in self._steps),
            losses=losses,
            time_s=times,
            boxing_s=tuple(tuple(row[1::3]) for row in steps),
            boxed_bytes=tuple(tuple(int(sent) for sent in row[2::3]) for row in steps),
            memory_bytes=tuple(_memory(row) for row in rows) if memory else (),
            num_steps=self.num_steps,
            devices=tuple(_device(row) for row in rows) if device else (),
        )
        self._first_step += len(self._steps)
        self._steps, self._losses = [], []
        typical = median(block.step_times_s) if times and times[0] else 0.0
        if typical > 0:
            self.interval = min(max(1, round(INTERVAL_S / typical)), _MOST_STEPS)
        return block, [row[0] for row in rows]

    def take(self) -> tuple[int, list[tuple[int, Interval]], list[Any]]:
        """The steps since the last exchange as this rank saw them, without one: their first number, the samples and
        the interval of each, their losses.
        """
        first, steps, losses = self._first_step, self._read(), self._losses
        self._first_step += len(steps)
        samples = [step.samples for step in self._steps]
        self._steps, self._losses = [], []
        return first, list(zip(samples, steps, strict=True)), losses

    def _read(self) -> list[Interval]:
        return [self.world.traffic.between(step.start, step.stop) for step in self._steps]

    def _exchange(self, memory: dict[str, int], device: dict[str, float], number: float) -> list[list[float]]:
        own = [number, *(float(memory.get(kind, -1)) for kind in _KINDS)]
        own += [float(device.get(kind, -1)) for kind in DEVICE_KINDS]
        for step in self._read():
            own += [step.time_s, step.exchange_s, float(step.sent_bytes)]
        mine = torch.tensor(own, dtype=torch.float64, device=self.world.device)
        gathered = self.world.transport.all_gather(mine, "collecting steps")
        return [row.tolist() for row in gathered]


def _memory(row: Sequence[float]) -> dict[str, int]:
    return {kind: int(size) for kind, size in zip(_KINDS, row[1:_MEMORY], strict=True) if size >= 0}


def _device(row: Sequence[float]) -> dict[str, float]:
    return {kind: value for kind, value in zip(DEVICE_KINDS, row[_MEMORY:_HEADER], strict=True) if value >= 0}


def _fetched(losses: Sequence[Any]) -> tuple[float | None, ...]:
    """The losses as numbers, the global ones in one exchange."""
    tensors = [loss.detach() for loss in losses if isinstance(loss, torch.Tensor)]
    if not tensors:
        return tuple(None if loss is None else float(loss) for loss in losses)
    values = torch.stack(tensors) if len(tensors) > 1 else tensors[0].reshape(1)
    fetched = iter((value_on_all_ranks(values) if isinstance(values, GlobalTensor) else values).tolist())
    return tuple(
        next(fetched) if isinstance(loss, torch.Tensor) else None if loss is None else float(loss) for loss in losses
    )


Listener = Callable[[object], None]
"""Gets what is to be reported: blocks, spans, events."""
