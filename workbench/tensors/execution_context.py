"""What changes in a world while a program runs, apart from what the world is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from workbench.core.placement import Placement


class ModuleCall(NamedTuple):
    """What holds inside the call of a parallelized module, also when a part of it is recomputed in backward.

    Attributes:
        stage_order: placements on which operands of different stages may meet; the latest of theirs wins.
        num_samples: rows of the module's inputs, where they agree.
        in_order_of_calls: whether output hooks box for the layer that is called next; else for the one listed next.
        batch: fingerprint of the plain inputs of a call outside of a scheduled step.
    """

    stage_order: tuple[Placement, ...] = ()
    num_samples: int | None = None
    in_order_of_calls: bool = False
    batch: str = ""


OUTSIDE = ModuleCall()


def batch_in_header(batch: str) -> str:
    """A fingerprint as the end of a header."""
    return f", of batch {batch}" if batch else ""


@dataclass(slots=True)
class ExecutionContext:
    """The state of the program that runs in a world, as ``world.context``: what it is in, and what it has counted.

    Attributes:
        generator: source of the keys of random tensors; equal on all ranks as long as they run the same program.
        implicit_boxing_allowed: False under ``wb.debug.explicit_boxing()``.
        checks_agreement: whether plain tensors that meet global ones are compared over the ranks.
        tracer: the innermost active ``wb.debug.trace()``, which records every boxing; None without one.
        action_timer: records the forwards, backwards and optimizers' steps of a loop that a live view shows; else None.
        profiler: counts steps for a profile; else None.
        recorder: the recorder of the step that ``wb.capture`` is recording; None outside of one.
        call: what holds inside the call of a parallelized module in progress.
        made_once: by layout, what plain tensors became in a call. Ranks forget plans at other times, this never.
        stage_orders: of the modules with several stages that the program has parallelized; the newest is last.
        batch: fingerprint of the plain tensors of the last batch with gradients, for headers (see ``of_batch``).
        running: the scheduled step in progress (see ``training.pipelining``); None outside of one.
        in_parameter_hook: whether a hook of ``register_hook`` on a parameter runs.
        micro_batch: the micro-batch of that step that runs now; 0 outside of one.
        num_edges: by micro-batch, how many boxings were called so far.
        num_sums: by group of ranks, how many sums were called so far.
        latest: the layouts of the latest boxing and the function that needed it; for messages.
        local_type: the class of the tensors that ``to_local`` gives; programs of ``flow`` have their own.
    """

    generator: torch.Generator | None = None
    implicit_boxing_allowed: bool = True
    checks_agreement: bool = field(default_factory=lambda: os.environ.get("WORKBENCH_CHECK", "0") not in ("", "0"))
    tracer: Any = None
    action_timer: Any = None
    profiler: Any = None
    recorder: Any = None
    call: ModuleCall = OUTSIDE
    made_once: dict[Any, Any] = field(default_factory=dict)
    stage_orders: dict[tuple[Placement, ...], None] = field(default_factory=dict)
    batch: str = ""
    running: Any = None
    in_parameter_hook: bool = False
    micro_batch: int = 0
    num_edges: dict[int, int] = field(default_factory=dict)
    num_sums: dict[tuple[int, ...], int] = field(default_factory=dict)
    latest: tuple[Any, Any, str] | None = None
    local_type: type[torch.Tensor] = torch.Tensor

    def add_stage_order(self, order: tuple[Placement, ...]) -> None:
        """Note the stages of a module that is parallelized; nothing if it has one."""
        if order:
            self.stage_orders.pop(order, None)
            self.stage_orders[order] = None

    def latest_stage(self, placements: set[Placement]) -> Placement | None:
        """The stage on which operands on these placements meet, by the order of the call in progress, outside of one
        that of the newest module with such stages. None if one of them is no stage, in any grid of its ranks.
        """
        for order in reversed(self.stage_orders) if self.call is OUTSIDE else (self.call.stage_order,):
            same = (map(placement.has_ranks_of, order) for placement in placements)
            stages = [next((stage for stage, is_same in enumerate(found) if is_same), -1) for found in same]
            if min(stages) >= 0:
                return order[max(stages)]
        return None

    @contextmanager
    def temporarily(self, **values: Any) -> Iterator[None]:
        """Set attributes, and give them back the values from before: ``with context.temporarily(tracer=tracer):``."""
        before = {name: getattr(self, name) for name in values}
        self._set(values)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def begin_action(self, kind: str, stage: int | None = None) -> None:
        """A forward (F), a backward (B) or an optimizer's step (O) begins; a schedule times its own actions."""
        if self.action_timer is not None and self.running is None:
            self.action_timer.begin(kind, stage)

    def end_action(self, kind: str) -> None:
        """It ends, well or not."""
        if self.action_timer is not None and self.running is None:
            self.action_timer.end(kind)

    def end_step(self, optimizer: Any) -> None:
        """An optimizer has made its step, and the parameters are in their places."""
        self.end_action("O")
        if self.profiler is not None:
            self.profiler.step_ends(optimizer)

    def forget_progress(self) -> None:
        """Begin to count anew, outside of every call and step, as all ranks of a rebuilt world do."""
        self.num_edges.clear()
        self.num_sums.clear()
        self.made_once.clear()
        self.latest = None
        self.micro_batch, self.call, self.batch, self.running = 0, OUTSIDE, "", None

    @property
    def of_batch(self) -> str:
        """The batch in the header of an exchange inside a call, a scheduled step or a backward; else "".

        Ranks with different batches have diverged, and may not mix their rows.
        """
        if self.running is not None or torch._C._current_graph_task_id() >= 0:
            return batch_in_header(self.batch if self.running is None else self.running.batch)
        return batch_in_header(self.call.batch)

    @property
    def position(self) -> int:
        """How many boxings of this micro-batch were called so far: the position in the program."""
        return self.num_edges.get(self.micro_batch, 0)

    @position.setter
    def position(self, count: int) -> None:
        self.num_edges[self.micro_batch] = count

    def next_tag(self) -> int:
        """A number for the next exchange: (micro-batch, position in the program), the same on every rank.

        Every rank counts every boxing call, involved or not; the backward of a call is its tag with the low bit set.
        """
        edge = self.num_edges.get(self.micro_batch, 0)
        self.num_edges[self.micro_batch] = edge + 1
        return (self.micro_batch << 17 | (edge & 0xFFFF) << 1) & 0x3FFFFFFF

    def next_sum_tag(self, group: tuple[int, ...]) -> int:
        """A number for the next sum over ``group``, of a range of its own: only the group's ranks count it."""
        number = self.num_sums[group] = self.num_sums.get(group, 0) + 1
        return 0x20000000 | (number & 0xFFFF) << 1
