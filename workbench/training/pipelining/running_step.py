"""The scheduled step in progress, as boxing, dispatch and reads see it; ``world.context.running`` holds it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from workbench.core.placement import Placement
from workbench.errors import StrategyError
from workbench.pipeline.check import Edges, along_stages, check_table
from workbench.pipeline.schedules import Table
from workbench.tensors.boxing.box import MicroBatchBoxings
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch
from workbench.tensors.leaf_gradients import has_hooks
from workbench.tensors.world import World
from workbench.transport.user_code import user_location

_OF_GRADIENTS = (None, "backward")
"""Functions of boxings of gradients: between layers, and of a plain tensor, which all ranks get."""


@dataclass
class PlainLeaf:
    """A plain leaf of one micro-batch's forward, and its gradient: terms, on the ranks of a stage."""

    step: RunningStep
    leaf: torch.Tensor
    world: World
    micro_batch: int
    grad: GlobalTensor | None = None

    def keeps(self, grad: GlobalTensor) -> bool:
        """Take the gradient that a backward has found. False where it is needed at once: by a forward
        (``torch.autograd.grad``) or a hook.
        """
        if self.step.edges is not None or has_hooks(self.leaf):
            return False
        self.grad = grad
        return True


@dataclass
class RunningStep:
    """The scheduled step in progress.

    Attributes:
        placements: the ranks of every stage.
        schedule: its name, for messages.
        table: the actions of all ranks of the pipeline axis.
        num_micro_batches: micro-batches of this step.
        batch: fingerprint of the plain tensors of the whole batch, targets too; headers of exchanges contain it.
        edges: (from stage, to stage) of the boxings of the present forward; None in a backward.
        observer: receives every boxing while a forward cache records a call; else None.
        splits_backward: whether this step computes gradients of inputs and of weights in separate actions.
        keeps_operands: whether the function that runs is asked again for gradients of weights, so that a checkpoint
            keeps what it reads. The engine sets it around each such function.
        computes_weights: whether gradients of weights are computed, from what checkpoints have kept.
        losses: if the program itself calls ``backward``, the losses that wait for the schedule's backward. None if a
            backward runs at once.
        runs_backward: whether the schedule's own backward runs, which gives all leaves their gradients.
        hooks: hooks after accumulation that wait for the end of this micro-batch's backward, by number.
        leaves: the plain leaves that forwards have met, with their gradients; these are summed after the step.
        boxings: the key of the boxings that tensors keep for this micro-batch of this stage; None between actions.
    """

    placements: tuple[Placement, ...]
    schedule: str
    table: Table
    num_micro_batches: int
    batch: str = ""
    edges: list[tuple[int, int | None]] | None = None
    observer: Any = None
    splits_backward: bool = False
    keeps_operands: bool = False
    computes_weights: bool = False
    losses: list[Any] | None = None
    runs_backward: bool = False
    hooks: dict[int, Callable[[], None]] = field(default_factory=dict)
    leaves: list[PlainLeaf] = field(default_factory=list)
    boxings: MicroBatchBoxings | None = None
    _known_problems: dict[Edges, list[str]] = field(init=False, repr=False, default_factory=dict)

    def stage_of(self, spec: Spec) -> int | None:
        """The first stage with all ranks of a tensor; None for a tensor on the ranks of several."""
        has_all = (placement.includes(spec.layout.placement) for placement in self.placements)
        return next((stage for stage, found in enumerate(has_all) if found), None)

    def refuse_second_recomputation(self) -> None:
        """A checkpoint is to run a function again, in a backward.

        Raises:
            StrategyError: for gradients of weights, which ranks compute at their own times.
        """
        if self.computes_weights:
            raise StrategyError(
                f"{self.schedule}: a layer would run again 2 times in a backward (torch.utils.checkpoint), for its "
                "inputs and for its weights: a function reads other tensors for its weights. Use 1f1b, or leave the "
                "checkpoint out."
            )

    def defers_backward(self, losses: list[Any], *, is_plain: bool) -> bool:
        """Whether a backward from ``losses`` waits for the schedule; ``is_plain``: it has no gradients or inputs given.

        Raises:
            StrategyError: the backward has to wait, but it is given gradients or inputs, or does not start at a scalar.
        """
        if self.losses is None:
            return False
        if not is_plain or any(loss.dim() for loss in losses):
            raise StrategyError(
                f"backward() from {len(losses)} tensors of {[loss.dim() for loss in losses]} dims inside a step of "
                f"{self.num_micro_batches} micro-batches: the schedule runs it later, from scalars (0 dims), for all "
                "parameters. Call loss.backward() without arguments, on a mean or a sum."
            )
        self.losses += losses
        return True

    def add_edge(self, tensor: GlobalTensor, target: Spec, function: str, tag: int) -> None:
        """Record a boxing that goes from one stage to another.

        An edge back to an earlier stage blocks most schedules for ever. Every rank runs the whole program, so every
        rank finds it here, before any rank waits.
        """
        source = tensor._spec
        if self.observer is not None:
            self.observer.add(tensor, target, function, tag, source.world.context.position - 1)
        with local_torch():
            self.check_edge(source, target, function, has_gradient=tensor.requires_grad and torch.is_grad_enabled())

    def check_edge(self, source: Spec, target: Spec, function: str | None, has_gradient: bool) -> None:
        """Refuse an edge of the forward that the schedule does not allow. ``function`` is None for a gradient, and
        ``has_gradient`` is false of one that no backward passes again: stages wait for it in this forward only.

        An edge to the ranks of several stages (another model in the loss, such as a critic) is one to each of them.
        Without a gradient it may still run. So may the reading of a value, which has no name and is checked by itself.
        """
        if self.edges is None or source.layout.placement == target.layout.placement:
            return
        start, end = self.stage_of(source), self.stage_of(target)
        if function in _OF_GRADIENTS and not has_gradient and start is not None:
            ends = self._stages_among(target)
            waits = along_stages(len(self.placements), reads_values=True)
            if min(ends) < start and (problems := self._problems(waits)):
                self._refuse_edge(function, start, ends, problems[0])
            return
        if start is None or start == end or (end is None and not (function and has_gradient)):
            return
        ends = [end] if end is not None else self._stages_among(target)
        self.edges += [(start, stage) for stage in ends if stage != start]
        if min(ends, default=start) < start and (problems := self._problems(self.edges)):
            self._refuse_edge(function, start, ends, problems[0])

    def _problems(self, edges: Edges) -> list[str]:
        """Why the table cannot run with these edges. All micro-batches have the same ones, and a check takes long."""
        known = self._known_problems.get(key := tuple(edges))
        if known is None:
            known = check_table(self.table, len(self.placements), self.num_micro_batches, edges)
            self._known_problems[key] = known
        return known

    def _stages_among(self, spec: Spec) -> list[int]:
        """The stages with some of the ranks of a tensor."""
        ranks = set(spec.layout.placement)
        return [stage for stage, placement in enumerate(self.placements) if not ranks.isdisjoint(placement)]

    def _refuse_edge(self, function: str | None, start: int, ends: list[int], problem: str) -> NoReturn:
        rule = (
            f"under {self.schedule} with {self.num_micro_batches} micro-batches an edge that goes back deadlocks "
            f"({problem})"
        )
        there = f"stage{'s' if len(ends) > 1 else ''} {' and '.join(map(str, ends))}"
        if function in _OF_GRADIENTS:
            whose = "" if function is None else " of a plain tensor, which all ranks get,"
            stage = "one stage" if function is None else "stage 0"
            raise StrategyError(
                f"a gradient{whose} that the forward itself computes (torch.autograd.grad) goes from stage {start} "
                f"back to {there}: {rule}. Put the layers that it passes on {stage}, or use the schedule gpipe."
            )
        if function.endswith(" in place"):
            raise StrategyError(
                f"{function}{user_location()}: a tensor on {there} is to take what comes from stage {start}; "
                f"{rule}. Put the layers that make both on one stage, make a new tensor (x = x + y in place of x += y, "
                "torch.where in place of x[mask] = y), or use the schedule gpipe."
            )
        where = f"layer {function!r}" if function else "an operation"
        detached = "give it x.detach() if no gradient has to come back, " if len(ends) > 1 else ""
        raise StrategyError(
            f"{where} is on {there}, but its input comes from stage {start}: {rule}. "
            f"Put {repr(function) if function else 'it'} on stage {start}, {detached}or use the schedule gpipe."
        )

    def add_reuse(self, tensor: GlobalTensor, boxed: GlobalTensor, function: str) -> None:
        """Record that an operation takes a boxing of a tensor that an earlier one has made."""
        if self.observer is not None:
            self.observer.add_reuse(tensor, boxed, function, tensor._spec.world.context.position)

    def numbered_leaf(self, local: torch.Tensor, spec: Spec) -> PlainLeaf | None:
        """A plain leaf that meets global tensors in a forward of several stages, if it keeps its gradient until the
        step ends: in a backward, ranks of other stages would not come to sum it. None if it is summed at once.
        """
        context = spec.world.context
        is_forward = self.edges is not None and len(self.placements) > 1
        if not is_forward or context.recorder is not None or not local.is_leaf or not spec.layout.is_broadcast:
            return None
        if self.observer is not None:
            self.observer.can_skip = False  # every rank counts the same leaves
        self.leaves.append(PlainLeaf(self, local, spec.world, context.micro_batch))
        return self.leaves[-1]

    def prepare_reading(self, tensor: GlobalTensor, has_to_move: bool) -> None:
        """Before the ranks of all stages wait for a value (``item()`` and its like), in the forward that they run.

        Sends do not block, so ranks whose schedule lets all stages be in the same forward get it. They wait for the
        stage that has it, which is right and slow.

        Raises:
            StrategyError: under the schedule, stages would wait for ever; or a backward reads the value.
        """
        if self.observer is not None:
            self.observer.can_skip = False  # the call may branch on the value
        if len(self.placements) == 1 or not has_to_move:
            return
        stage = self.stage_of(tensor._spec)
        what = (
            "reading a value (item, tolist, bool, nonzero, print, or torch.distributions without validate_args=False) "
            f"of a tensor of shape {tuple(tensor._spec.shape)}"
            f"{'' if stage is None else f' on stage {stage}'} inside a step of {len(self.placements)} stages and "
            f"{self.num_micro_batches} micro-batches"
        )
        if torch._C._current_graph_task_id() >= 0:
            raise StrategyError(
                f"{what}, in a backward (a hook, or a layer that runs again): stages are in the backward of a "
                "micro-batch at different times. Read it after the step, or in the forward; leave recompute out, or "
                "choose with torch.where."
            )
        if self._problems(along_stages(len(self.placements), reads_values=True)):
            raise StrategyError(
                f"{what}: all stages need the value in the same forward, and under {self.schedule} they would wait for "
                "each other for ever. Use 1f1b or gpipe with 1 stage on each rank, read it after the step, or choose "
                "with torch.where."
            )
        if self.num_micro_batches > 1:
            warn_of_reading(what)


class ValueReadWarning(UserWarning):
    """A value of one stage is read inside a pipeline's step, and all stages wait for it."""


_warned: set[str] = set()


def warn_of_reading(what: str) -> None:
    """Warn once for each line of the user's code."""
    where = user_location()
    if where not in _warned:
        _warned.add(where)
        warnings.warn(
            f"{what}{where}: it is sent to all ranks, and in each micro-batch all stages wait for it. That is right, "
            "but slow. Read it after the step, or choose with torch.where.",
            ValueReadWarning,
            stacklevel=2,
        )
