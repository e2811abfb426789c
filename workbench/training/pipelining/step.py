"""``wb.forward_backward`` and ``wb.evaluate``: a batch through a parallelized module, by its strategy's schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from workbench.core.strategy import ResolvedStrategy
from workbench.errors import RunError
from workbench.pipeline.schedules import Action, Table, make_table
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.random import draw_key
from workbench.tensors.world import World, current
from workbench.training.batches import Batch, Count, LossFunction, as_tensors, call, check_loss_fn, join, loss_of
from workbench.training.pipelining.executor import Executor, SingleStage, Stage
from workbench.training.pipelining.local_forward import forward_caches_of
from workbench.training.pipelining.running_step import RunningStep
from workbench.training.pipelining.stage_ranks import stage_ranks
from workbench.training.strategies.state import ParallelState, state_of

Around = Callable[[], AbstractContextManager[Any]]


def forward_backward(
    module: nn.Module,
    loss_fn: LossFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    *,
    count: Count | None = None,
) -> torch.Tensor:
    """Forward and backward of one step: all micro-batches of the module's strategy, in the order of its schedule.

    Gradients are added to those the parameters have, as by ``backward()``; an optimizer's step follows. All ranks call
    it with the same batch. The loss of a step is the mean over its samples: each micro-batch's loss, a mean itself,
    counts with its share of them. That of a model which takes its mean over something else (transformers': over the
    words that are not ignored) does so too, since nobody can tell from outside; where these are not equally many in
    all micro-batches, say how many there are with ``count``, and the step's loss is the mean over them. A micro-batch
    with none of them runs forward, and has no part in loss and gradients.

    Args:
        module: a module after ``wb.parallelize``; its strategy says how many micro-batches (``mb=``), and the schedule.
        loss_fn: (output, targets) -> a scalar; the output is whatever the module returns. Results of different stages
            (an auxiliary loss) meet on the latest of them, as inside the module. None for a module that returns its
            own loss: as its result, as ``.loss`` or ``["loss"]`` (transformers), or as a tuple's scalar.
        inputs: a tensor, a tuple for several arguments, or a dict for keywords (``BatchEncoding`` too). Samples lie
            along dim 0, where tensors are cut; positions, masks and numbers that all samples share go whole.
        targets: a tensor, or dicts and tuples of them, cut in the same way. None: a ``loss_fn`` gets a dict's entries
            ``label``, ``labels``, ``label_ids``, ``target`` or ``targets`` (the only one by itself, several as a dict),
            and the module the others; None if there is none.
        count: (inputs, targets) of a micro-batch -> of how many terms its loss is the mean.

    Returns:
        The loss of the step, without history: one scalar, the same on all ranks. Reading it (``item``) is an exchange.

    Raises:
        StrategyError: no strategy, a forward that reads a value that other stages hold, an edge that goes back where
            the schedule does not let it.
        RunError: a batch that cannot be cut or that the module does not take, no loss, a loss that is not a scalar or
            learns nothing.

    >>> model = wb.parallelize(nn.Linear(4, 2), "*: data | mb=2")
    >>> wb.forward_backward(model, F.mse_loss, torch.ones(8, 4), torch.ones(8, 2)).shape
    torch.Size([])

    Of a model of transformers it is ``wb.forward_backward(model, inputs={"input_ids": ids, "labels": ids})``.

    The same numbers, on one device, are those of the same micro-batches one after the other. (Huang et al., arXiv
    1811.06965; Narayanan et al., arXiv 2104.04473; Qi et al., arXiv 2401.10241.)
    """
    state = state_of(module)
    if loss_fn is not None and not callable(loss_fn):
        raise RunError(
            f"forward_backward: loss_fn is a {type(loss_fn).__name__}, not a function (output, targets) -> loss. The "
            "batch of a module that computes its own loss is given by name: wb.forward_backward(model, inputs=batch)."
        )
    check_loss_fn(loss_fn)
    batch = Batch.of_arguments(inputs, targets, loss_fn)
    parts = batch.cut(state.resolved.num_micro_batches, count)
    return train_micro_batches(module, loss_fn, parts)


def train_micro_batches(
    module: nn.Module, loss_fn: LossFunction | None, parts: Sequence[Batch], around_forward: Around = nullcontext
) -> torch.Tensor:
    """Forward and backward of micro-batches that are cut already; ``around_forward`` is entered around each forward."""
    state, world = state_of(module), current()
    executor, table = _prepare(module, state, world, len(parts))
    prepare = executor.prepare_batch
    parts = [replace(part, inputs=prepare(part.inputs), targets=prepare(part.targets)) for part in parts]

    def program(index: int) -> torch.Tensor:
        part = parts[index]
        with around_forward():
            output = call(module, part.inputs)
            with state.layouts.combining_on_latest_stage():  # an auxiliary loss may come from an earlier stage
                loss = loss_of(output, part.targets, loss_fn)
        if part.share == 1.0:
            return loss
        return loss * part.share if part.share else torch.zeros_like(loss.detach())

    actions = _actions_of(world.rank, table, state.resolved)
    losses = executor.train(actions, program, state.after_backward)
    state.spans = executor.spans
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def evaluate(module: nn.Module, inputs: Any) -> Any:
    """The module's output for a batch, without gradients: micro-batches go through the stages one behind the other.

    The module is in evaluation mode meanwhile. All ranks call it with the same batch.

    Args:
        module: a module after ``wb.parallelize``.
        inputs: as for ``forward_backward``.

    Returns:
        What the module returns, its tensors joined along dim 0; scalars are means, weighted by the samples. Tensors are
        global and lie on the stage that made them; ``full_tensor`` and ``item`` read them.

    Raises:
        StrategyError: no strategy.
        RunError: a batch that cannot be cut, or that the module does not take.

    >>> wb.evaluate(wb.parallelize(nn.Linear(4, 2), "*: data | mb=2"), torch.ones(5, 4)).shape
    torch.Size([5, 2])
    """
    state, world = state_of(module), current()
    parts = Batch(as_tensors(inputs)).cut(state.resolved.num_micro_batches)
    executor, table = _prepare(module, state, world, len(parts))
    parts = [replace(part, inputs=executor.prepare_batch(part.inputs)) for part in parts]
    outputs: dict[int, Any] = {}

    def take(stage: Stage, index: int, output: Any) -> None:
        found = tree_map(lambda leaf: stage.to_rank_world(leaf) if isinstance(leaf, GlobalTensor) else leaf, output)
        outputs[index] = _present(outputs[index], found) if index in outputs else found

    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            forwards = [action for action in _actions_of(world.rank, table, state.resolved) if action.kind == "F"]
            executor.evaluate(forwards, lambda index: call(module, parts[index].inputs), take)
            state.spans = executor.spans
            return join([outputs[index] for index in range(len(parts))], [part.share for part in parts])
    finally:
        for part, mode in modes:
            part.training = mode


def _prepare(module: nn.Module, state: ParallelState, world: World, num_micro_batches: int) -> tuple[Executor, Table]:
    resolved = state.resolved
    table = _table(resolved.schedule, resolved.num_stages, num_micro_batches, resolved.degrees[0])
    own = _stages_of(world.rank, resolved)
    if state.forward_caches is None:
        placement = state.placements[own[0]]
        state.forward_caches = forward_caches_of(module, state, own[0], placement, world) if len(own) == 1 else []
    stages: Mapping[int, Stage] = {own[0]: SingleStage(world, state.forward_caches)}
    placements = state.placements
    if len(own) > 1:
        several = stages = stage_ranks(module, state, world, own)
        placements = several[own[0]].placements
    running = RunningStep(placements, resolved.schedule, table, num_micro_batches)
    return Executor(world, stages, running, draw_key(world)), table


@lru_cache(maxsize=64)
def _table(schedule: str, num_stages: int, num_micro_batches: int, num_ranks: int) -> Table:
    if num_stages == 1:
        return [[Action(0, kind, index) for index in range(num_micro_batches) for kind in "FB"]]
    return make_table(schedule, num_stages, num_micro_batches, num_ranks)


def _slice_of(rank: int, resolved: ResolvedStrategy) -> int:
    """The slice of the pipeline axis on which a rank is."""
    return next(s for s in range(resolved.degrees[0]) if rank in resolved.stage_ranks(s))


def _stages_of(rank: int, resolved: ResolvedStrategy) -> range:
    return range(_slice_of(rank, resolved), resolved.num_stages, resolved.degrees[0])


def _actions_of(rank: int, table: Table, resolved: ResolvedStrategy) -> list[Action]:
    return table[_slice_of(rank, resolved)]


def _present(known: Any, found: Any) -> Any:
    """Of what two stages of a rank know of an output, the tensors that are no placeholders."""
    return tree_map(lambda a, b: b if getattr(a, "is_placeholder", False) else a, known, found)
