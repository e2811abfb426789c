"""``wb.forward_backward`` and ``wb.evaluate``: a batch through a parallelized module, by its strategy's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from workbench.core.presets import strategy_of
from workbench.core.strategy import ResolvedStrategy, Strategy
from workbench.errors import RunError
from workbench.pipeline.schedules import Table
from workbench.tensors.agreement import fingerprint
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.program_state import ProgramState
from workbench.tensors.random import draw_key
from workbench.tensors.tensor_state import forget_derived, version_of
from workbench.tensors.world import World, current
from workbench.training.batches import Batch, Count, LossFunction, call, check_loss_fn, loss_of
from workbench.training.fresh_inputs import fresh
from workbench.training.gradients.stale_optimizer import optimizers_of
from workbench.training.joined_outputs import join, refuse_dataclasses
from workbench.training.mean_losses import check_own_loss
from workbench.training.parallel import place
from workbench.training.pipelining.executor import Executor, SingleStage, Stage, table_of, without_placeholder
from workbench.training.pipelining.local_forward import forward_caches_of
from workbench.training.pipelining.running_step import RunningStep
from workbench.training.pipelining.stage_ranks import stage_ranks
from workbench.training.pipelining.stage_states import StageStates
from workbench.training.sample_rows import Rows, batch_leaves
from workbench.training.strategies.call_order import Calls, recorded_calls
from workbench.training.strategies.state import ParallelState, describe, state_of

Around = Callable[[], AbstractContextManager[Any]]


def forward_backward(
    module: nn.Module,
    loss_fn: LossFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    *,
    count: Count | None = None,
    rows: Rows | None = None,
) -> torch.Tensor:
    """Forward and backward of one step: all micro-batches of the module's strategy, in the order of its schedule.

    It adds gradients to those of the parameters, as ``backward()`` does; call an optimizer's step afterwards. All ranks
    call it with the same batch. The loss of a step is the mean over its samples: each micro-batch's loss is a mean,
    weighted by its number of samples. If the loss is a mean over something else, such as words that are not ignored,
    and micro-batches have different numbers of these, give the numbers with ``count``: the step's loss is then the mean
    over all of them. A micro-batch whose count is 0 runs forward and adds nothing to loss and gradients.

    Args:
        module: a module after ``wb.parallelize``; its strategy has the number of micro-batches (``mb=``) and the
            schedule.
        loss_fn: (output, targets) -> a scalar mean; the output is the module's result. Results of different stages (an
            auxiliary loss) are combined on the latest of these stages, as inside the module. None: the module returns
            its own loss, as its result, as ``.loss`` or ``["loss"]`` (transformers), or as a tuple's scalar.
        inputs: a tensor, a tuple for several arguments, or a dict for keywords (``BatchEncoding`` too). Dim 0 of a
            tensor counts samples and is cut. Positions, masks and numbers that all samples share are not cut. A list of
            dicts, texts, or tensors of other sizes has an entry for each sample: labels of detection, masks.
        targets: a tensor, or dicts and tuples of them, cut in the same way. None with a dict of inputs: ``loss_fn``
            gets the entries ``label``, ``labels``, ``label_ids``, ``target`` or ``targets`` (one alone, several as a
            dict), and the module the others.
        count: (inputs, targets) of a micro-batch -> the number of terms of its mean loss.
        rows: of tensors whose dim 0 does not count samples, by their keys (or positions, ``"0"``): how many rows each
            sample has, ``{"patches": [16, 8]}``, or None for one that goes whole to each micro-batch. Patches of
            images are known by the batch's ``image_grid_thw``, if each sample has one image.

    Returns:
        The loss of the step, without history: one scalar, the same on all ranks. ``item`` is an exchange.

    Raises:
        StrategyError: no strategy, or an edge to an earlier stage, or a value that all stages wait for, which the
            schedule does not allow.
        RunError: a batch that cannot be cut or that the module does not take, no loss, a loss that is not a scalar or
            has no gradient; under several micro-batches a loss that is a sum over samples, as its first call or an
            entry ``num_items_in_batch`` shows.
        LayoutError: the ranks pass different first batches.
        CollectiveAborted: later batches differ, in an exchange of the step.

    >>> model = wb.parallelize(nn.Linear(4, 2), "*: data | mb=2")
    >>> wb.forward_backward(model, F.mse_loss, torch.ones(8, 4), torch.ones(8, 2)).shape
    torch.Size([])

    For a model of transformers: ``wb.forward_backward(model, inputs={"input_ids": ids, "labels": ids})``.

    The numbers are those of the same micro-batches in order on one device. (Huang et al., arXiv 1811.06965; Narayanan
    et al., arXiv 2104.04473; Qi et al., arXiv 2401.10241.)
    """
    state = state_of(module)
    if loss_fn is not None and not callable(loss_fn):
        raise RunError(
            f"forward_backward: loss_fn is a {type(loss_fn).__name__}, not a function (output, targets) -> loss. The "
            "batch of a module that computes its own loss is given by name: wb.forward_backward(model, inputs=batch)."
        )
    check_loss_fn(loss_fn)
    batch = Batch.of_arguments(inputs, targets, loss_fn, rows)
    state.compare_first_batch({"inputs": batch.inputs, "targets": batch.targets}, "forward_backward")
    parts = batch.cut(state.resolved.num_micro_batches, count)
    return train_micro_batches(module, loss_fn, parts)


def train_micro_batches(
    module: nn.Module, loss_fn: LossFunction | None, parts: Sequence[Batch], around_forward: Around = nullcontext
) -> torch.Tensor:
    """Forward and backward of micro-batches that are cut already; ``around_forward`` is entered around each forward."""
    world = current()
    if loss_fn is None:
        check_own_loss(parts[0].inputs, len(parts))
    state = reorder_stages(module, state_of(module), parts[0].inputs, world)
    batch = fingerprint(tree_leaves([(part.inputs, part.targets) for part in parts]))
    executor, table = _prepare(module, state, world, len(parts), batch, loss_fn)
    prepare = executor.prepare_batch
    parts = [replace(part, inputs=prepare(part.inputs, is_input=True), targets=prepare(part.targets)) for part in parts]
    given = _given_to(executor)

    def program(index: int) -> torch.Tensor:
        part = parts[index]
        with around_forward():
            output = call(module, given(part.inputs))
            if len(parts) > 1 and loss_fn is not None:
                state.check_loss(loss_fn, output, part.targets, len(parts))
            with state.layouts.combining_on_latest_stage():  # an auxiliary loss may come from an earlier stage
                loss = loss_of(output, part.targets, loss_fn)
        return part.term_of(loss)

    losses = executor.train(table[_slice_of(world.rank, state.resolved)], program)
    state.spans = executor.spans
    if world.context.action_timer is not None:
        world.context.action_timer.add(executor.spans)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def evaluate(module: nn.Module, inputs: Any, *, rows: Rows | None = None) -> Any:
    """The module's output for a batch, without gradients. Micro-batches pass through the stages one after the other.

    The module is in evaluation mode during the call. All ranks call it with the same batch.

    Args:
        module: a module after ``wb.parallelize``.
        inputs, rows: as for ``forward_backward``.

    Returns:
        The module's output, with its tensors joined along dim 0, and a list with a dict for each sample (boxes) by its
        entries; scalars are means, weighted by samples. Tensors are global, on the stage that made them;
        ``full_tensor`` and ``item`` read them on every rank. Under several micro-batches, dim 0 has to count samples: a
        table, a mean over the batch or a matrix of pairs is refused where sizes show it, and joined too where its
        length is a multiple of a micro-batch's size and all have this size.

    Raises:
        StrategyError: the module has no strategy.
        RunError: a batch that cannot be cut, or that the module does not take; under several micro-batches an entry
            ``num_items_in_batch``; an output that cannot be joined, such as a dataclass that torch does not know
            (``torch.export.register_dataclass``).

    >>> wb.evaluate(wb.parallelize(nn.Linear(4, 2), "*: data | mb=2"), torch.ones(5, 4)).shape
    torch.Size([5, 2])
    """
    state, world = state_of(module), current()
    batch = Batch.of_arguments(inputs, None, None, rows)
    state.compare_first_batch({"inputs": batch.inputs}, "evaluate", batch_leaves(batch.inputs))
    parts = batch.cut(state.resolved.num_micro_batches)
    check_own_loss(parts[0].inputs, len(parts))
    state = reorder_stages(module, state, parts[0].inputs, world)
    known = fingerprint(tree_leaves([part.inputs for part in parts]))
    executor, table = _prepare(module, state, world, len(parts), known)
    parts = [replace(part, inputs=executor.prepare_batch(part.inputs)) for part in parts]
    outputs: dict[int, Any] = {}
    sizes = None if batch.has_rows else [round(part.share * batch.num_samples) for part in parts]

    def take(stage: Stage, index: int, output: Any) -> None:
        if len(parts) > 1 or len(executor.stages) > 1:
            rule = "Outputs of several micro-batches or stages are put together tensor by tensor"
            refuse_dataclasses(output, "evaluate: the module returns", rule)
        found = tree_map(lambda leaf: stage.to_rank_world(leaf) if isinstance(leaf, GlobalTensor) else leaf, output)
        outputs[index] = tree_map(without_placeholder, outputs[index], found) if index in outputs else found

    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            forwards = [action for action in table[_slice_of(world.rank, state.resolved)] if action.kind == "F"]
            given = _given_to(executor)
            executor.evaluate(forwards, lambda index: call(module, given(parts[index].inputs)), take)
            state.spans = executor.spans
            return join([outputs[index] for index in range(len(parts))], [part.share for part in parts], sizes)
    finally:
        for part, mode in modes:
            part.training = mode


def _given_to(executor: Executor) -> Callable[[Any], Any]:
    """What a forward gets of the inputs of a micro-batch. For several stages it runs as often, each time on a copy."""
    return fresh if len(executor.stages) > 1 else lambda inputs: inputs


def _prepare(
    module: nn.Module,
    state: ParallelState,
    world: World,
    num_micro_batches: int,
    batch: str,
    loss_fn: LossFunction | None = None,
) -> tuple[Executor, Table]:
    resolved = state.resolved
    state.layouts.plan.settle()
    table = table_of(resolved.schedule, resolved.num_stages, num_micro_batches, resolved.degrees[0])
    own = resolved.stages_by_slice()[_slice_of(world.rank, resolved)]
    if state.forward_caches is None:
        placement = state.placements[own[0]]
        state.forward_caches = forward_caches_of(module, state, own[0], placement, world) if len(own) == 1 else []
    stages: Mapping[int, Stage] = {own[0]: SingleStage(world, state.forward_caches)}
    placements, states = state.placements, None
    if len(own) > 1:
        several = stages = stage_ranks(module, state, world, own)
        placements = several[own[0]].placements
        states = StageStates([module], world.device, _buffers_everywhere(module, state), [loss_fn])
    running = RunningStep(placements, resolved.schedule, table, num_micro_batches, batch)
    return Executor(world, stages, running, draw_key(world), states), table


def _buffers_everywhere(module: nn.Module, state: ParallelState) -> list[torch.Tensor]:
    """The memory of buffers that every stage has, and may write."""
    placement = state.layouts.everywhere
    buffers = [b for b in module.buffers() if isinstance(b, GlobalTensor) and b._spec.layout.placement == placement]
    with local_torch():
        return [plain(buffer) for buffer in buffers]


def _slice_of(rank: int, resolved: ResolvedStrategy) -> int:
    """The slice of the pipeline axis on which a rank is."""
    return next(s for s in range(resolved.degrees[0]) if rank in resolved.stage_ranks(s))


def reorder_stages(module: nn.Module, state: ParallelState, inputs: Any, world: World) -> ParallelState:
    """What is in force on the module once its stages follow the order of calls. All ranks call it.

    ``parallelize`` knows no batch: it cuts a preset's stages in the order in which the module lists its layers. One
    forward of the first micro-batch, without a schedule, shows the order of calls. Where the stages are others by it,
    weights, buffers and the state of optimizers are boxed to them; the parameters stay the same objects. After an
    error the next call looks anew.
    """
    if state.preset is None:
        return state
    preset, state.preset = state.preset, None
    if state.resolved.num_stages == 1:
        return state
    try:
        has_grad = torch.is_grad_enabled()  # which False below would switch on
        # An evaluation may be in inference mode, and tensors that are made there never train.
        with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
            own = strategy_of(preset, describe(module, _calls(module, fresh(inputs), world)), world.world_size)
            strategy: Strategy = all_gather_object(own, world, "the order of a model's layers")[0]  # one for all ranks
            if strategy == state.strategy:
                return state
            place(module, strategy, optimizers_of(module, world), world.world_size)
    except BaseException:
        state.preset = preset
        raise
    reordered = state_of(module)
    reordered.compared = state.compared
    return reordered


def _calls(module: nn.Module, inputs: Any, world: World) -> Calls:
    """The calls of a forward that leaves nothing behind."""
    hooks = [h for part in module.modules() for h in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())]
    before = ProgramState([module], world.device, code=hooks)
    with _values_kept(module), world.context.temporarily(generator=torch.Generator(), tracer=None):
        try:
            with recorded_calls(module) as calls:
                call(module, inputs)
        finally:
            before.put_back()
    return calls


@contextmanager
def _values_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards the module has its buffers and frozen parameters, with the values that they have now: a forward may
    update a running mean of weights.
    """
    held: list[tuple[dict[str, Any], str, Any]] = [
        (table, name, tensor)
        for part in module.modules()
        for table in (part._buffers, part._parameters)
        for name, tensor in table.items()
        if table is part._buffers or (tensor is not None and not tensor.requires_grad)
    ]
    here = [t for _, _, t in held if isinstance(t, GlobalTensor) and not t._spec.is_placeholder]
    with local_torch():
        before = [(tensor, version_of(tensor), plain(tensor).clone()) for tensor in here]
    try:
        yield
    finally:
        for table, name, tensor in held:
            table[name] = tensor
            if isinstance(tensor, GlobalTensor):
                forget_derived(tensor)  # the write below is seen on one stage's ranks only
        with torch.no_grad(), local_torch():
            for tensor, version, value in before:
                if version_of(tensor) != version:
                    plain(tensor).copy_(value)
