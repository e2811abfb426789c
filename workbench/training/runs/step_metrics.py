"""Steps of all ranks, collected in one exchange about three times a second.

One all-gather carries every rank's measurements of its last steps, and the other values on which the ranks must agree
at that moment. So all ranks have all of them, rank 0 alone reports, and no rank waits at any other step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from workbench.core.metrics import DEVICE_KINDS, MEMORY_KINDS, LastSteps, LossTerm, StepBlock
from workbench.core.step_values import (  # fmt: skip
    GRADIENT_NORM,
    MFU,
    TOKENS_PER_S,
    UNKNOWN_NORM,
    Pairs,
    known,
    rates,
    whole_norms,
)
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.world import World
from workbench.transport.traffic import Interval, Moment

INTERVAL_S = 0.3
"""Seconds between two exchanges if steps are shorter. An exchange costs every rank most of a millisecond, and reports
pass through two more processes."""
_MOST_STEPS = 1000
_NORMS_PER_EXCHANGE = 30
_COLUMNS = 4
"""Of a step: its time, the time in exchanges, the sent bytes, the norm of this rank's part of the gradients."""
_KINDS = (*MEMORY_KINDS, "peak")
_MEMORY = 1 + len(_KINDS)
_HEADER = _MEMORY + len(DEVICE_KINDS)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of this rank, between two of its moments."""

    samples: int
    start: Moment
    stop: Moment
    tokens: int = 0
    norm: torch.Tensor | None = None
    """Of this rank's part of the gradients, on its device."""


class StepCollector:
    """Keeps this rank's steps until they are due. ``add`` every step. When ``is_due``, all ranks call ``collect``.

    Args:
        world: the ranks that take the steps together.
        num_steps: the number of planned steps; 0 if unknown.
        flops_per_sample: operations of a step, all ranks together, for their share of the devices' peak; 0 if unknown.
    """

    def __init__(self, world: World, num_steps: int = 0, flops_per_sample: float = 0.0) -> None:
        self.world, self.num_steps, self.flops_per_sample = world, num_steps, flops_per_sample
        self.interval = 1  # steps between two exchanges, the same on all ranks
        self._first_step = 0
        self._steps: list[MeasuredStep] = []
        self._losses: list[Any] = []
        self._values: dict[str, list[tuple[int, Any]]] = {}

    def add(self, step: MeasuredStep, loss: Any = None, values: Mapping[str, Any] | None = None) -> None:
        """Record a step. ``loss`` and ``values`` are numbers or scalar tensors, which stay on their device until
        ``collect``.
        """
        self._steps.append(step)
        self._losses.append(loss)
        self.add_values(values or {})

    def add_values(self, values: Mapping[str, Any]) -> None:
        """Record values of the last step."""
        for name, value in values.items():
            self._values.setdefault(name, []).append((self.num_added - 1, value))

    @property
    def num_added(self) -> int:
        """The number of steps so far."""
        return self._first_step + len(self._steps)

    @property
    def measures_norm(self) -> bool:
        """Whether the next step's gradient norm is to be measured. It costs little, but something: about a hundred
        times a second. All ranks have the same answer.
        """
        return self.num_added % max(1, self.interval // _NORMS_PER_EXCHANGE) == 0

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
        reported = {name: _fetched_pairs(self._values[name]) for name in sorted(self._values)}
        rows = self._exchange(memory or {}, device or {}, number)
        steps = [row[_HEADER:] for row in rows]
        times = tuple(tuple(row[0::_COLUMNS]) for row in steps)
        block = StepBlock(
            first_step=self._first_step,
            samples=tuple(step.samples for step in self._steps),
            losses=losses,
            time_s=times,
            boxing_s=tuple(tuple(row[1::_COLUMNS]) for row in steps),
            boxed_bytes=tuple(tuple(int(sent) for sent in row[2::_COLUMNS]) for row in steps),
            memory_bytes=tuple(_memory(row) for row in rows) if memory else (),
            num_steps=self.num_steps,
            devices=tuple(_device(row) for row in rows) if device else (),
        )
        norms = whole_norms(self._first_step, [row[3::_COLUMNS] for row in steps])
        block.values.update(known({**self._rates(block), GRADIENT_NORM: norms, **reported}))
        self._forget()
        typical = median(block.step_times_s) if times and times[0] else 0.0
        if typical > 0:
            self.interval = min(max(1, round(INTERVAL_S / typical)), _MOST_STEPS)
        return block, [row[0] for row in rows]

    def _rates(self, block: StepBlock) -> dict[str, Pairs]:
        """What the steps do in a second, over all ranks."""
        gpus = {
            device.get("gpu", rank): device.get("peak_flops_per_s", 0.0) for rank, device in enumerate(block.devices)
        }
        work = [self.flops_per_sample * samples for samples in block.samples] if all(gpus.values()) else []
        first, times_s = block.first_step, block.step_times_s
        found = {TOKENS_PER_S: rates(first, [step.tokens for step in self._steps], times_s)}
        return {**found, MFU: rates(first, work, times_s, sum(gpus.values()))} if gpus and work else found

    def _forget(self) -> None:
        self._first_step += len(self._steps)
        self._steps, self._losses, self._values = [], [], {}

    def take(self, term: Callable[[Any], LossTerm | None]) -> LastSteps | None:
        """The steps since the last exchange as this rank saw them, without an exchange; None if there is nothing.
        ``term`` gives this rank's part of a loss or value.
        """
        if not (self._steps or self._values):
            return None
        intervals = self._read()
        values = {name: tuple((step, term(value)) for step, value in pairs) for name, pairs in self._values.items()}
        found = LastSteps(
            self.world.rank,
            self.world.world_size,
            self._first_step,
            tuple(step.samples for step in self._steps),
            tuple(map(term, self._losses)),
            tuple(interval.time_s for interval in intervals),
            tuple(interval.exchange_s for interval in intervals),
            tuple(interval.sent_bytes for interval in intervals),
            tokens=tuple(step.tokens for step in self._steps),
            norms=tuple(self._read_norms()),
            values=values,
        )
        self._forget()
        return found

    def _read_norms(self) -> list[float]:
        """The norms of this rank's parts of the gradients, fetched together."""
        norms = [step.norm for step in self._steps if step.norm is not None]
        fetched = iter(torch.stack(norms).tolist() if norms else ())
        return [UNKNOWN_NORM if step.norm is None else next(fetched) for step in self._steps]

    def _read(self) -> list[Interval]:
        return [self.world.traffic.between(step.start, step.stop) for step in self._steps]

    def _exchange(self, memory: dict[str, int], device: dict[str, float], number: float) -> list[list[float]]:
        own = [number, *(float(memory.get(kind, -1)) for kind in _KINDS)]
        own += [float(device.get(kind, -1)) for kind in DEVICE_KINDS]
        for step, norm in zip(self._read(), self._read_norms(), strict=True):
            own += [step.time_s, step.exchange_s, float(step.sent_bytes), norm]
        mine = torch.tensor(own, dtype=torch.float64, device=self.world.device)
        gathered = self.world.transport.all_gather(mine, "collecting steps")
        return [row.tolist() for row in gathered]


def num_tokens(inputs: Any) -> int:
    """The tokens of a batch: the size of ``input_ids``, or of its only input if that is a table of whole numbers; else
    0.

    >>> num_tokens({"input_ids": torch.zeros(4, 128, dtype=torch.long), "attention_mask": torch.ones(4, 128)})
    512
    """
    if isinstance(inputs, Mapping):
        inputs = inputs.get("input_ids")
    leaves = tree_leaves(inputs)
    only = leaves[0] if len(leaves) == 1 else None
    is_table = isinstance(only, torch.Tensor) and only.dim() == 2 and only.dtype in (torch.int64, torch.int32)
    return only.numel() if is_table and only is not None else 0


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


def _fetched_pairs(pairs: Sequence[tuple[int, Any]]) -> Pairs:
    """Values as numbers, by their steps. The last one counts where a step has several."""
    fetched = dict(zip((step for step, _ in pairs), _fetched([value for _, value in pairs]), strict=True))
    return tuple((step, value) for step, value in fetched.items() if value is not None)


Listener = Callable[[object], None]
"""Gets what is to be reported: blocks, spans, events."""
