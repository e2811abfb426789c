"""``wb.parallelize``: a strategy applied to an unmodified nn.Module.

Parameters and buffers become global tensors; a hook on every layer boxes its input to what the layer's choice means, so
that neighbours need not know each other:

    data           parameters B, input S(0) on every axis of the stage
    model:column   weight S(0), input S(0) on the data axis and B on the model axis, output S(last)
    model:row      weight S(1), input S(0), S(last), output P, boxed to what the next layer expects
    expert         weights S(0), tokens go to their experts (see ``strategies/expert_forward``), output P on the model
                   axis; ``model`` means the same for experts, on the model axis

torch's attention is split by heads: its weights of queries, keys and values by columns, its output projection by rows.
An embedding's columns are the width of its table and its rows are the words; both take whole indices on the model axis.
An output hook boxes what a row-split layer or a table gives. With the option ``sequence``, norms of model-parallel
layers take S(1) on the model axis: the sum behind a row becomes a reduce-scatter, the input of a column an all-gather.
Nothing in forward changes. Ranks outside a layer's stage run it on placeholders.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from workbench.core.ineffective_choices import rows_that_split_nothing
from workbench.core.presets import StrategyLike, stages_preset, strategy_of
from workbench.core.sharding_plan import ShardingPlan
from workbench.tensors.agreement import check_same_on_all_ranks
from workbench.tensors.patch_table import install_loaded
from workbench.tensors.torch_patches import compile_ddp_fsdp
from workbench.tensors.world import current
from workbench.training import offload_option, precision, recompute
from workbench.training.gradients.nested_steps import optimizers_within
from workbench.training.strategies import overlapped_forward
from workbench.training.strategies.expert_forward import ExpertForward
from workbench.training.strategies.layout_hooks import Interruptible, RootHooks, hook_layer, hook_projections
from workbench.training.strategies.layouts import LayoutsInUse, StageLayouts
from workbench.training.strategies.listed_experts import hook_listed_experts
from workbench.training.strategies.materialize import Init, materialize, names_on_meta
from workbench.training.strategies.reshard_state import states_of
from workbench.training.strategies.shard_parameters import (
    move_parameters,
    refuse_overlaps,
    replicate_buffers,
    shard_parameters,
)
from workbench.training.strategies.state import (
    PLAN,
    STATE,
    ParallelState,
    describe,
    layers_of,
    parameter_owners,
    state_of,
    unhook,
)
from workbench.training.zero import sharded_units as zero
from workbench.transport.user_code import user_stacklevel

_Module = TypeVar("_Module", bound=nn.Module)
CHECKS: tuple[Callable[[nn.Module, ParallelState], None], ...] = (
    zero.check,
    recompute.check,
    precision.check,
    offload_option.check,
)
"""What options refuse, with ``StrategyError`` on all ranks, before anything of the module changes."""
INSTALLERS: tuple[Callable[[nn.Module, ParallelState], list[Any]], ...] = (
    overlapped_forward.install,
    zero.install,
    recompute.install,
    precision.install,
    offload_option.install,
)
"""Options that act on a module: each returns handles with ``remove()``, none where its option is off."""


def parallelize(
    module: _Module,
    strategy: StrategyLike,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    init: Init = None,
) -> _Module:
    """Shard ``module`` over the ranks of the world, in place. All ranks call it with equal weights.

    Afterwards an optimizer of ``torch.optim`` over ``module.parameters()`` works unchanged: its step first completes
    the sums of gradients, in buckets, and then updates the local shards. Called again with another strategy, it boxes
    the weights to the new layouts; the parameters stay the same objects.

    Args:
        module: any nn.Module on the CPU, on this rank's device, or built under ``torch.device("meta")``.
        strategy: a ``wb.Strategy``; its text, e.g. ``"fc1: data; fc2: model"``; its rows as a dict, e.g.
            ``{"fc1": "data", "fc2": "model"}``; a file of its text (``Path``); or a preset, made for the module:
            ``"data"``, ``"model"``, ``"pipeline"``, ``"hybrid"``, with options if needed: ``"pipeline | mb=8"``. The
            stages of ``"pipeline"`` follow the order in which the first batch goes through the layers.
        optimizer: an optimizer over parameters of the module, and perhaps others, or a list of several. Its state gets
            the new layouts, and so does that of optimizers that it has as attributes.
        init: values of a module on meta, shard by shard. None: its modules' ``reset_parameters`` (of ``transformers``:
            ``_init_weights``), with the same numbers for every strategy. A path: safetensors files, see
            ``wb.checkpoint.load_safetensors``. A function: called with every submodule, children first. ``"empty"``:
            computes only what no checkpoint contains; ``wb.checkpoint.load`` brings the rest.

    Returns:
        The module. ``print(model.plan)`` is a table of all layers' layouts and boxings, unless the module has an
        attribute of that name.

    Raises:
        StrategyError: the strategy does not fit the module or the number of ranks; the optimizer has none of its
            parameters; the devices or the disk cannot do what the strategy asks; nothing gives values to tensors on
            meta. Only this last one comes after the module has changed; another call may give the values.
        LayoutError: the ranks hold different weights.
        CheckpointError: the files do not fit.

    ``wb.parallelize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "*: model")`` splits both weights.
    """
    world = current()
    given = optimizer if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
    optimizers = [each for one in given for each in (one, *optimizers_within(one))]
    place(module, strategy, optimizers, world.world_size, init)
    return module


def place(
    module: nn.Module, strategy: StrategyLike, optimizers: Sequence[Optimizer], num_ranks: int, init: Init = None
) -> None:
    """`parallelize` with any number of optimizers, over the first ``num_ranks`` ranks. All ranks of the world call it.

    On the other ranks the module's tensors are placeholders.
    """
    world = current()
    install_loaded()
    compile_ddp_fsdp.refuse_wrapped(module)
    described = describe(module)
    preset = stages_preset(strategy)
    strategy = strategy_of(strategy, described, num_ranks)
    resolved = strategy.resolve(described, num_ranks)
    if world.device.type != "meta":  # a dry run
        for text in rows_that_split_nothing(strategy, described, resolved):
            warnings.warn(f"parallelize: {text}", stacklevel=user_stacklevel())
    refuse_overlaps(module)
    check_same_on_all_ranks(module, world)
    states = states_of(optimizers, module, world)
    on_meta = names_on_meta(module)
    layers = list(layers_of(module))
    plan = ShardingPlan(described, resolved, world.device.type, world.transport.cost)
    layouts = StageLayouts(world, plan)
    state = ParallelState(strategy, resolved, LayoutsInUse(layouts), placements=layouts.placements, preset=preset)
    for check in CHECKS:
        check(module, state)
    unhook(module)
    converted: dict[nn.Parameter, nn.Parameter] = {}
    owners = parameter_owners(module, resolved)
    move_parameters(owners, layouts, converted)
    state.handles += hook_listed_experts(module, state.in_use, resolved.layers)
    for (_, layer), choice, row in zip(layers, resolved.layers, described, strict=True):
        own = dict(layer.named_parameters(recurse=False, remove_duplicate=False))
        foreign = [name for name, parameter in own.items() if owners[parameter].stage != choice.stage]
        shard_parameters(layer, owners, layouts, converted)
        state.handles += hook_layer(layer, state.in_use, choice, foreign, state.on_interrupt)
        if row.experts and row.expert is None:
            state.handles.append(ExpertForward(layer, state.in_use, choice, row.experts))
    state.handles += hook_projections([layer for _, layer in layers], state.in_use)
    replicate_buffers(module, layouts)
    state.handles += RootHooks(state.in_use).register(module, state.on_interrupt)
    module.__dict__[STATE] = state
    world.context.add_stage_order(layouts.stage_order)
    if not hasattr(module, PLAN):
        module.__dict__[PLAN] = plan
    for install in INSTALLERS:
        state.handles += install(module, state)
    state.handles.append(Interruptible(module, state.on_interrupt))
    if on_meta and world.device.type != "meta":
        state.without_values = on_meta
        materialize(module, on_meta, init, world)
        state.without_values = []
    for each in states:
        each.reshard(converted)


__all__ = ["INSTALLERS", "ParallelState", "describe", "parallelize", "state_of", "unhook"]
