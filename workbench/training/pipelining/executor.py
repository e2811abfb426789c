"""Runs one rank's actions of a pipeline table.

A stage runs the whole program of a micro-batch; tensors of other stages are placeholders and cost little. So an action
is the whole forward, or the whole backward from that micro-batch's loss, and a pipeline runs any forward code. Sends
never block. Their tags hold micro-batch, position in the program and direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_map

from workbench.errors import RunError, StrategyError
from workbench.pipeline.schedules import Action, Table, make_table
from workbench.tensors.boxing.box import MicroBatchBoxings
from workbench.tensors.dispatch.hooks import run_hooks
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.world import World
from workbench.training.pipelining.forward_cache import ForwardCache, cached_forwards
from workbench.training.pipelining.running_step import PlainLeaf, RunningStep
from workbench.training.pipelining.split_backward import WeightGradients, backward_of_inputs
from workbench.training.pipelining.stage_ranks import StageRank
from workbench.training.pipelining.stage_states import StageStates
from workbench.training.recorded_actions import RecordedAction
from workbench.transport.closed import close_after_error

MicroBatchFunction = Callable[[int], Any]
"""micro-batch number -> its loss, already weighted with its share of the step; or what an evaluation returns."""


@lru_cache(maxsize=64)
def table_of(schedule: str, num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> Table:
    """The table of a step. With one stage, or none, micro-batches run one after the other."""
    if num_stages < 2:
        return make_table("1f1b", 1, num_micro_batches)
    return make_table(schedule, num_stages, num_micro_batches, num_ranks)


class SingleStage:
    """The stage of a rank that has one stage: it sees the module unchanged. ``StageRank`` has the same methods."""

    def __init__(self, world: World, forward_caches: Sequence[ForwardCache] = ()) -> None:
        self.world, self._forward_caches = world, forward_caches
        for cache in forward_caches:
            cache.begin_step()

    def activated(self) -> AbstractContextManager[None]:
        """Context of one action, in which the module holds the stage's parameters, buffers and forward caches."""
        return cached_forwards(self._forward_caches)

    def to_rank_world(self, result: torch.Tensor) -> torch.Tensor:
        """A detached result of the stage in this rank's own world; a placeholder where another stage holds it."""
        return result

    def write_gradients(self) -> None:
        """Write the stage's gradients to the module's own parameters."""


Stage = SingleStage | StageRank


class Executor:
    """Runs actions of this rank's stages, and records in ``spans`` when each ran.

    Args:
        world: this rank's world.
        stages: the stages of this rank, by number.
        running: the state of the step that the world's context holds.
        seed: of the random numbers of every micro-batch; their order does not matter.
        states: of the program, where the rank has several stages.
    """

    def __init__(
        self,
        world: World,
        stages: Mapping[int, Stage],
        running: RunningStep,
        seed: int,
        states: StageStates | None = None,
    ) -> None:
        self.world, self.stages, self.running, self.seed, self.states = world, stages, running, seed, states
        self.generator = torch.Generator()
        self.spans: list[RecordedAction] = []
        self._graphs: dict[tuple[int, int], torch.Tensor] = {}
        self._deferred: dict[tuple[int, int], WeightGradients] = {}
        self._hooks: dict[tuple[int, int], dict[int, Callable[[], None]]] = {}
        self._boxings: dict[tuple[int, int], MicroBatchBoxings] = {}

    def train(self, actions: Sequence[Action], program: MicroBatchFunction) -> list[torch.Tensor]:
        """Run forwards and backwards; the losses of the micro-batches, detached, in their order."""
        losses: dict[int, torch.Tensor] = {}
        self.running.splits_backward = any(action.kind == "I" for action in actions)
        with self._scheduled():
            for action in actions:
                with self._running(action) as stage:
                    if action.kind == "F":
                        loss = self._forward(action, program)
                        known = losses.get(action.micro_batch)
                        losses[action.micro_batch] = without_placeholder(known, stage.to_rank_world(loss))
                        continue
                    self._backward(action)
                    if action.kind != "I":
                        stage.write_gradients()
                        run_hooks(self._hooks.pop(_key(action), {}))
                        self._boxings.pop(_key(action)).end()
        self._sum_gradients_of_leaves()
        return [losses[index] for index in sorted(losses)]

    def _sum_gradients_of_leaves(self) -> None:
        """Give the plain leaves of forwards their gradients, in an order that all ranks know.

        A rank with several stages has met a leaf once in the forward of each; one of them may hold the gradient.
        """
        met: dict[tuple[int, int], list[tuple[Stage, PlainLeaf]]] = {}
        for _, stage in sorted(self.stages.items()):
            numbers = Counter[int]()
            for kept in self.running.leaves:
                if kept.world is stage.world:
                    met.setdefault((kept.micro_batch, numbers[kept.micro_batch]), []).append((stage, kept))
                    numbers[kept.micro_batch] += 1
        self.running.leaves = []
        for _, found in sorted(met.items(), key=lambda item: item[0]):
            grad: Any = None
            for stage, kept in found:
                if kept.grad is not None:
                    grad = without_placeholder(grad, stage.to_rank_world(kept.grad))
            if grad is not None:
                leaf, value = found[0][1].leaf, value_on_all_ranks(grad)
                leaf.grad = value if leaf.grad is None else leaf.grad + value

    def evaluate(
        self, actions: Sequence[Action], program: MicroBatchFunction, take: Callable[[Stage, int, Any], None]
    ) -> None:
        """Run forwards only; ``take`` gets every stage's result."""
        with self._scheduled():
            for action in actions:
                with self._running(action) as stage:
                    take(stage, action.micro_batch, program(action.micro_batch))
                    self._boxings.pop(_key(action)).end()

    def prepare_batch(self, batch: Any, *, is_input: bool = False) -> Any:
        """A batch in the form that the stages of this rank take: with several stages, global tensors become plain. So
        do inputs that a later stage has made, such as generated tokens: the forward could not send them back.
        """

        def prepare(leaf: Any) -> Any:
            is_taken = isinstance(leaf, GlobalTensor) and (
                len(self.stages) > 1 or (is_input and not leaf.requires_grad and self.running.stage_of(leaf._spec))
            )
            return value_on_all_ranks(leaf) if is_taken else leaf

        return tree_map(prepare, batch)

    def _forward(self, action: Action, program: MicroBatchFunction) -> torch.Tensor:
        self.running.edges = []
        loss = self._graphs[_key(action)] = program(action.micro_batch)
        return loss.detach()

    def _backward(self, action: Action) -> None:
        self.running.hooks = self._hooks.setdefault(_key(action), {})
        if action.kind == "W":
            if (kept := self._deferred.pop(_key(action), None)) is not None:
                kept.accumulate()
            return
        loss = self._graphs.pop(_key(action))
        if loss.requires_grad:  # a micro-batch of weight 0 has no backward
            self.running.runs_backward = True
            try:
                if action.kind == "I":
                    self._deferred[_key(action)] = backward_of_inputs(loss, self.running)
                else:
                    loss.backward()
            finally:
                self.running.runs_backward = False

    def _seed(self, micro_batch: int) -> None:
        recorder = self.world.context.recorder
        if recorder is None:
            _set_seed(self.generator, self.seed, micro_batch)
        else:
            recorder.seed(_set_seed, self.generator, self.seed, micro_batch)

    @contextmanager
    def _scheduled(self) -> Iterator[None]:
        try:
            yield
            if self.states is not None:
                self.states.go_on_as(max(self.stages))
        except BaseException as error:
            self._close_world(error)
            raise
        finally:
            for boxings in self._boxings.values():  # of a step that failed
                boxings.end()
        self.world.transport.flush()

    def _close_world(self, error: BaseException) -> None:
        """End the world after a failure, as ranks are at different micro-batches; not if all refused the first one
        and have received all of it: of several stages on a rank, only the first has run.
        """
        is_refusal = isinstance(error, (StrategyError, RunError)) and not self.spans and len(self.stages) == 1
        num_stages = len(self.running.placements)
        if num_stages > 1 and not is_refusal:
            close_after_error(self.world, error, f"a step of {num_stages} stages")

    @contextmanager
    def _running(self, action: Action) -> Iterator[Stage]:
        """The context of one action; records its span."""
        stage, traffic = self.stages[action.stage], self.world.traffic
        started = traffic.moment()
        if self.states is not None:
            self.states.go_on_as(action.stage)
        context = stage.world.context
        state = context.temporarily(micro_batch=action.micro_batch, running=self.running, generator=self.generator)
        self.running.boxings = self._boxings.setdefault(_key(action), MicroBatchBoxings())
        with stage.activated(), state:
            if action.kind == "F":
                context.position = 0
                self._seed(action.micro_batch)
            yield stage
        self.running.edges = self.running.boxings = None
        self.spans.append(RecordedAction(action, started, traffic.moment()))


def _key(action: Action) -> tuple[int, int]:
    return action.stage, action.micro_batch


def without_placeholder(known: torch.Tensor | None, found: torch.Tensor) -> torch.Tensor:
    """What a rank's stages have of one result of a micro-batch; not a placeholder if one of them has data."""
    return found if known is None or getattr(known, "is_placeholder", False) else known


def _set_seed(generator: torch.Generator, seed: int, index: int) -> None:
    generator.manual_seed((seed + 0x9E3779B97F4A7C15 * (index + 1)) & 0x7FFFFFFFFFFFFFFF)
