"""``wb.parallelize``: a strategy applied to an unmodified nn.Module.

Parameters and buffers become global tensors; a hook on every layer boxes its input to what the layer's choice means, so
that neighbours need not know each other:

    data           parameters B, input S(0) on every axis of the stage
    model:column   weight S(0), input S(0) on the data axis and B on the model axis, output S(last)
    model:row      weight S(1), input S(0), S(last), output P, boxed to what the next layer expects

An embedding's columns are the width of its table and its rows are the words; both take whole indices on the model axis.
Nothing in forward changes. Ranks outside a layer's stage run it on ghosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import NdSbp, Partial, Sbp, broadcast, split
from workbench.core.strategy import TRANSPOSED_KINDS, Layer, ResolvedLayer, ResolvedStrategy, Strategy
from workbench.errors import StrategyError
from workbench.runtime import optim
from workbench.runtime.agreement import check_same_everywhere
from workbench.runtime.boxing import box, box_implicitly
from workbench.runtime.entry import enter_as_broadcast
from workbench.runtime.tensor import GlobalTensor, ghost_storage, label, spec_of
from workbench.runtime.world import World, current

_STATE = "_workbench_parallel"
ROOT = "(root)"
"""Row name of parameters that belong to the model itself and to no layer of it."""


@dataclass
class ParallelState:
    """What ``parallelize`` did to a module: the strategy in force and the hooks that carry it."""

    strategy: Strategy
    resolved: ResolvedStrategy
    handles: list[Any]


def describe(model: nn.Module) -> list[Layer]:
    """The layers of a model as a strategy sees them: the modules that own parameters, in order."""
    return [
        Layer(
            name or ROOT,
            type(module).__name__,
            {short: tuple(p.shape) for short, p in module.named_parameters(recurse=False)},
            sum(p.numel() for p in module.parameters(recurse=False)),
        )
        for name, module in _layers(model)
    ]


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return (
        (name, module) for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    )


def _is_table(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Embedding)


def parallelize(module: nn.Module, strategy: Strategy | str) -> nn.Module:
    """Spread ``module`` over the ranks of the world. All ranks call it with equal weights; it works in place.

    Afterwards ``torch.optim`` over ``module.parameters()`` works as written: gradients are reduced in buckets before
    the step, which runs on the local shards. Calling it again with another strategy boxes the weights to the new
    layouts.

    Args:
        module: any nn.Module on the CPU or this rank's device.
        strategy: a ``wb.Strategy`` or its text, e.g. ``"fc1: data; fc2: model"``.

    Raises:
        StrategyError: the strategy does not fit the module or the number of ranks, or uses an option that is not
        there yet.
        LayoutError: the ranks hold different weights.

    ``wb.parallelize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "*: model")`` splits both weights.
    """
    world = current()
    strategy = Strategy(strategy) if isinstance(strategy, str) else strategy
    _check_options(strategy)
    resolved = strategy.resolve(describe(module), world.world_size)
    check_same_everywhere(module, world)
    unhook(module)
    layers = list(_layers(module))
    tables = {choice.name for choice, (_, layer) in zip(resolved.layers, layers, strict=True) if _is_table(layer)}
    plan = _ModulePlan(world, resolved, tables)
    converted: dict[int, nn.Parameter] = {}
    handles: list[Any] = []
    for position, (_, layer) in enumerate(layers):
        choice = resolved.layers[position]
        plan.convert_parameters(layer, choice, converted)
        handles += plan.hook(layer, choice, resolved.layers[position + 1] if position + 1 < len(layers) else None)
    plan.convert_buffers(module, layers)
    handles += _hook_root(module, world, plan.placements)
    module.__dict__[_STATE] = ParallelState(strategy, resolved, handles)
    optim.install_hooks()
    return module


def unhook(module: nn.Module) -> None:
    """Remove the hooks of an earlier ``parallelize``; parameters stay global tensors."""
    state = module.__dict__.pop(_STATE, None)
    for handle in state.handles if state else []:
        handle.remove()


def state_of(module: nn.Module) -> ParallelState:
    """The strategy in force; raises ``StrategyError`` for a module that was never parallelized."""
    if _STATE not in module.__dict__:
        raise StrategyError(
            f"{type(module).__name__} is not parallelized. Call wb.parallelize(module, strategy) first."
        )
    state: ParallelState = module.__dict__[_STATE]
    return state


def _check_options(strategy: Strategy) -> None:
    options = strategy.options
    missing = [f"zero={options.zero}"] * (options.zero > 0) + ["recompute"] * options.recompute
    missing += [options.precision] * (options.precision != "fp32")
    missing += [options.schedule or ""] * (options.schedule in ("interleaved", "zero_bubble"))
    if missing:
        raise StrategyError(f"strategy {str(strategy)!r}: {', '.join(missing)} cannot be run yet. Leave it out.")


class _ModulePlan:
    """Placements and layouts that a resolved strategy gives to parameters, buffers and inputs."""

    def __init__(self, world: World, resolved: ResolvedStrategy, tables: set[str]) -> None:
        self.world, self.resolved, self.tables = world, resolved, tables
        self._input_layouts: dict[tuple[str, int], Layout] = {}
        _, data, model = resolved.degrees
        # Axes of size one are left out: boxing along them would do nothing, at a price.
        self.axes = [name for name, size in (("data", data), ("model", model)) if size > 1] or ["data"]
        self.placements = tuple(self._placement(stage) for stage in range(resolved.degrees[0]))
        # 1F1B runs micro-batches in another order on every stage; an edge that goes back would wait for ever.
        self.goes_forward_only = resolved.num_micro_batches > 1 and resolved.schedule != "gpipe"

    def _placement(self, stage: int) -> Placement:
        grid = self.resolved.stage_grid(stage)
        ranks: Any = grid if len(self.axes) == 2 else self.resolved.stage_ranks(stage)
        return Placement.of(self.world.device.type, ranks)

    def layout(self, choice: ResolvedLayer, data: Sbp, model: Sbp) -> Layout:
        """A layout on the layer's stage from one entry for each of the two axes."""
        return Layout(self.placements[choice.stage], tuple(data if axis == "data" else model for axis in self.axes))

    def input_layout(self, choice: ResolvedLayer, ndim: int) -> Layout:
        """What the layer's choice means for its input; a scalar is everywhere."""
        known = self._input_layouts.get((choice.name, ndim))
        if known is None:
            known = self._input_layouts[choice.name, ndim] = self._input_layout(choice, ndim)
        return known

    def _input_layout(self, choice: ResolvedLayer, ndim: int) -> Layout:
        if ndim == 0:
            return self.layout(choice, broadcast, broadcast)
        if choice.parallel == "data":
            return self.layout(choice, split(0), split(0))
        takes_slices = choice.split == "row" and choice.name not in self.tables
        return self.layout(choice, split(0), split(ndim - 1) if takes_slices else broadcast)

    def parameter_layout(self, choice: ResolvedLayer, layer: nn.Module, name: str, ndim: int) -> Layout:
        """Where a parameter's slices lie; see the table at the top of this module."""
        outputs_last = _is_table(layer) or type(layer).__name__ in TRANSPOSED_KINDS
        if choice.split == "column":
            entry: Sbp = split(ndim - 1) if outputs_last else split(0)
        elif choice.split == "row" and ndim > 1:
            entry = split(0) if outputs_last else split(1)
        else:
            entry = broadcast
        return self.layout(choice, broadcast, entry)

    def convert_parameters(self, layer: nn.Module, choice: ResolvedLayer, converted: dict[int, nn.Parameter]) -> None:
        """Own parameters of a layer; a tied parameter is converted once, where it is met first."""
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if id(parameter) not in converted:
                layout = self.parameter_layout(choice, layer, name, parameter.dim())
                new = nn.Parameter(self._spread(parameter, layout), parameter.requires_grad)
                converted[id(parameter)] = converted[id(new)] = new
                new.__dict__["_tied_source"] = parameter  # keeps the id from being used again while we convert
            layer._parameters[name] = converted[id(parameter)]

    def convert_buffers(self, module: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
        """Buffers are whole on every rank of the stage of their layer, or of the nearest layer before."""
        choices = {id(layer): choice for (_, layer), choice in zip(layers, self.resolved.layers, strict=True)}
        choice = self.resolved.layers[0]
        for submodule in module.modules():
            choice = choices.get(id(submodule), choice)
            for name, buffer in submodule.named_buffers(recurse=False):
                submodule._buffers[name] = self._spread(buffer, self.layout(choice, broadcast, broadcast))
        for parameter in module.parameters():
            parameter.__dict__.pop("_tied_source", None)

    def _spread(self, tensor: torch.Tensor, layout: Layout) -> GlobalTensor:
        """This rank's slices of a tensor that all ranks hold, or of one that is global already."""
        with torch.no_grad():
            if isinstance(tensor, GlobalTensor):
                detached: Any = tensor.detach()
                return box(detached, layout.normalized(tensor._spec.shape))
            spec = spec_of(self.world, layout, tuple(tensor.shape))
            if spec.is_ghost:
                return label(ghost_storage(spec.shape, tensor.dtype, self.world.device), spec)
            region = spec.layout.region(spec.shape, self.world.rank)
            part = tensor.detach()[tuple(slice(start, stop) for start, stop in region)]
            return label(part.to(self.world.device, copy=True).contiguous(), spec)

    def hook(self, layer: nn.Module, choice: ResolvedLayer, following: ResolvedLayer | None) -> list[Any]:
        """Boxing at the door of a layer; behind a row-split one, its partial sums go to what the next layer expects."""
        stage = self.placements[choice.stage]

        def box_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):  # nearly always
                return (self._enter(args[0], choice),), kwargs
            return tree_map(lambda value: self._enter(value, choice), (args, kwargs))

        handles = [layer.register_forward_pre_hook(box_inputs, with_kwargs=True)]
        foreign = [n for n, p in layer.named_parameters(recurse=False) if p._spec.layout.placement != stage]  # type: ignore[attr-defined]
        if foreign:
            handles += _hook_tied(layer, foreign, self.layout(choice, broadcast, broadcast))
        if choice.split == "row":
            target = following if following and following.stage == choice.stage else None
            handles.append(
                layer.register_forward_hook(lambda module, args, output: self._end_partial(output, choice, target))
            )
        return handles

    def _enter(self, value: Any, choice: ResolvedLayer) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not isinstance(value, GlobalTensor):
            origin = f"layer {choice.name!r}: an input"
            layout = self.input_layout(choice, value.dim())
            value = enter_as_broadcast(value.to(self.world.device), self.world, layout, lambda: origin)
        shape = value._spec.shape
        layout = self.input_layout(choice, len(shape))
        if shape and shape[0] == 1 and value._spec.layout.is_broadcast:
            layout = layout.broadcast()  # positions and masks, alike for all samples
        if self.goes_forward_only:
            self._check_direction(value, choice)
        return box_implicitly(value, layout, choice.name)

    def _check_direction(self, value: GlobalTensor, choice: ResolvedLayer) -> None:
        placement = value._spec.layout.placement
        source = self.placements.index(placement) if placement in self.placements else 0
        if source > choice.stage:
            raise StrategyError(
                f"layer {choice.name!r} is on stage {choice.stage}, but its input comes from stage {source}: under "
                f"{self.resolved.schedule} with {self.resolved.num_micro_batches} micro-batches an edge "
                f"that goes back deadlocks. "
                f"Put {choice.name!r} on stage {source}, or use the schedule gpipe."
            )

    def _end_partial(self, output: Any, choice: ResolvedLayer, following: ResolvedLayer | None) -> Any:
        if not isinstance(output, GlobalTensor) or not output._spec.layout.has_partial:
            return output
        wanted = self.input_layout(following, output.dim()) if following else self.layout(choice, split(0), split(0))
        if following is not None and following.split == "row":
            wanted = self.layout(choice, split(0), broadcast)
        target: NdSbp = tuple(
            b if isinstance(a, Partial) else a for a, b in zip(output._spec.layout.sbp, wanted.sbp, strict=True)
        )
        return box_implicitly(output, output._spec.layout.with_sbp(target), choice.name)


def _hook_tied(layer: nn.Module, names: list[str], layout: Layout) -> list[Any]:
    """A parameter that lives on another stage: boxed here around each use, its gradient flows back by the same way."""
    kept: dict[str, Any] = {}

    def bring(module: nn.Module, args: Any) -> None:
        for name in names:
            kept[name] = module._parameters[name]
            module._parameters[name] = box(kept[name], layout)  # type: ignore[assignment]

    def put_back(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(kept)

    return [layer.register_forward_pre_hook(bring), layer.register_forward_hook(put_back, always_call=True)]


def _hook_root(module: nn.Module, world: World, placements: tuple[Placement, ...]) -> list[Any]:
    """Inside the module's call, operands on different stages meet on the latest of them."""
    if len(placements) == 1:
        return []

    def enter(*_: Any) -> None:
        world.stage_order = placements

    def leave(*_: Any) -> None:
        world.stage_order = ()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
