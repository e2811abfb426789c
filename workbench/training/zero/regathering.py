"""The parameters of a unit that backward gathers again, and ahead of their use.

Backward gathers before the unit's last node runs, at the same point on all ranks, and sends the shards that the unit
before it will need. Ranks may keep the graph of different calls alive, so a later call knows an earlier one by what is
here alone, which has no activation and no graph: all ranks gather ahead, or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from workbench.errors import CollectiveAborted
from workbench.tensors.boxing.bucketed import BoxingWork
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain
from workbench.tensors.world import World, at_shutdown
from workbench.training.gradients.shard import Shard
from workbench.training.zero.gather_scatter import start_gather


@dataclass(eq=False)
class Regathering:
    """What backward gathers for one call of a unit.

    Attributes:
        tag: of the messages.
        parameters, shards: the gathered parameters that this rank holds a part of.
        dtypes: the dtype in which backward gathers each parameter; None for one that it does not need.
        versions: of the parameters, when they were gathered.
        awaits_backward: whether the call has results for backward, which has not come to it yet.
    """

    tag: int
    parameters: list[GlobalTensor]
    shards: list[Shard]
    dtypes: list[torch.dtype | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    awaits_backward: bool = False
    _pending: BoxingWork | None = None
    _values: dict[int, torch.Tensor] | None = None

    def begin_backward(self, before: Regathering | None, grads: Any) -> None:
        """Gather before the first node of the unit's results runs, and begin to gather for the unit before it.

        Raises:
            RuntimeError: parameters have changed since forward. What is gathered ahead raises nothing, since backward
                may not reach that unit.
        """
        self.regather()
        self.awaits_backward = False
        if before is not None and before.awaits_backward and before._is_current():
            before._start()
            torch.autograd.Variable._execution_engine.queue_callback(before.cancel)

    def regather(self) -> dict[int, torch.Tensor]:
        """Gather the values for backward, by number."""
        if self._values is None:
            if not self._is_current():
                raise RuntimeError(
                    f"backward needs {len(self._numbers())} parameters as they were in forward, and one of them has "
                    "been modified by an inplace operation since (an optimizer's step, copy_). Under zero=3 parameters "
                    "are gathered again for backward. Call backward before they change."
                )
            self._start()
            work = self._take_pending()
            self._values = {}
            if work is not None:
                with torch.no_grad(), local_torch():
                    self._values = dict(zip(self._numbers(), work.finish(), strict=True))
        return self._values

    def release(self, grads: Any = None) -> None:
        """Drop the values; backward has the gradients."""
        self.cancel()
        self._values = None
        self.awaits_backward = False

    def cancel(self) -> None:
        """End a gathering that nothing has used."""
        if (work := self._take_pending()) is not None:
            work.finish()

    def _take_pending(self) -> BoxingWork | None:
        work, self._pending = self._pending, None
        if work is not None:
            _under_way.get(work.world, {}).pop(self, None)
        return work

    def _numbers(self) -> list[int]:
        return [i for i, dtype in enumerate(self.dtypes) if dtype is not None]

    def _is_current(self) -> bool:
        """Whether the parameters are as they were in forward; true if backward needs none."""
        return not self._numbers() or self.versions == versions_of(self.parameters)

    def _start(self) -> None:
        numbers = self._numbers()
        if self._values is not None or self._pending is not None or not numbers:
            return
        with torch.no_grad(), local_torch():
            parts = [plain(self.parameters[i]).to(self.dtypes[i]) for i in numbers]
            work = start_gather([self.shards[i] for i in numbers], parts, self.tag)
        self._pending = work
        _under_way.setdefault(work.world, {})[self] = work.world.num_rebuilds


_under_way: WeakKeyDictionary[World, dict[Regathering, int]] = WeakKeyDictionary()
"""By world, the calls of units whose parameters are on their way for a backward; how often the world had been rebuilt
when each began."""


def end_failed_backwards(world: World) -> None:
    """Receive what backwards that have failed had gathered ahead. No backward may be running.

    A later exchange may use the same tags, and would take the messages for its own.
    """
    for again, num_rebuilds in _under_way.pop(world, {}).items():
        work = again._take_pending()
        if work is not None and num_rebuilds == world.num_rebuilds:
            work.finish()


def _end_at_shutdown(world: World) -> None:
    """Simulated ranks may end with no message left, also where the program has caught the error of its backward."""
    if world.transport.scope == "process":
        with contextlib.suppress(CollectiveAborted):
            end_failed_backwards(world)


at_shutdown(_end_at_shutdown)


def versions_of(parameters: Iterable[GlobalTensor]) -> list[int]:
    """The number of writes to each that autograd refuses between forward and backward; 0 for tensors of inference mode,
    which have no count.
    """
    with local_torch():
        return [0 if parameter.is_inference() else parameter._version for parameter in parameters]
