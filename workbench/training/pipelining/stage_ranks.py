"""Several stages on one rank. Each runs as a *stage rank*, in a world of the stage ranks of all stages.

A rank with two stages runs the program of a micro-batch twice, each time with the other stage's layers as placeholders.
So all that holds for one stage per rank holds here: any forward code, skip edges, tied weights. While a stage runs, the
module holds its view of the parameters: the rank's own shards with another spec, and placeholders.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import broadcast
from workbench.core.strategy import ResolvedStrategy
from workbench.errors import StrategyError
from workbench.tensors.dispatch.hooks import hooks_of
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, new_placeholder, plain, spec_of, wrap
from workbench.tensors.leaf_gradients import accumulate_grad, mark_placeholder, read_grad
from workbench.tensors.simulated import Simulated
from workbench.tensors.tensor_state import gradient_state
from workbench.tensors.world import World
from workbench.training.gradients.overlap import GradientReducer
from workbench.training.gradients.shard import Shard
from workbench.training.pipelining.forward_cache import cached_forwards
from workbench.training.pipelining.local_forward import forward_caches_of
from workbench.training.pipelining.stage_transport import MessageQueues, Numbering, StageTransport, open_channels
from workbench.training.strategies.layouts import StageLayouts
from workbench.training.strategies.state import ROOT, ParallelState, layers_of, parameter_stages


class StageRank:
    """One of several stages of this rank; see ``executor.SingleStage``."""

    def __init__(
        self, module: nn.Module, state: ParallelState, rank_world: World, stage: int, queues: MessageQueues
    ) -> None:
        resolved, numbering = state.resolved, Numbering(state.resolved, rank_world.device.type)
        own = numbering.of(stage, rank_world.rank)
        self.transport = transport = StageTransport(rank_world, own, numbering, queues)
        self.rank_world, self._numbering = rank_world, numbering
        self._in_use, self._own_layouts = state.in_use, state.layouts
        self.world = World(own, len(numbering.rank_of), rank_world.device, transport)
        self.world.traffic, self.world.rank_of = rank_world.traffic, numbering.rank_of
        transport.context = self.world.context
        self.world.context.checks_agreement = False  # the check compares over all ranks
        self.world.num_rebuilds = rank_world.num_rebuilds
        self._layouts = _renumbered_layouts(state.layouts, self.world, numbering)
        self.placements = self._layouts.placements
        self._forward_caches = forward_caches_of(module, state, stage, self.placements[stage], self.world)
        self._views: list[tuple[dict[str, Any], str, GlobalTensor, GlobalTensor]] = []
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._view_parameters(module, resolved)
        self._view_buffers(module, resolved)

    def _view_parameters(self, module: nn.Module, resolved: ResolvedStrategy) -> None:
        self._stages, views = parameter_stages(module, resolved), dict[int, GlobalTensor]()
        for _, layer in layers_of(module):
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
                own: Any = parameter
                if id(own) not in views:
                    views[id(own)] = self._view_parameter(own)
                self._views.append((layer._parameters, name, own, views[id(own)]))

    def _view_parameter(self, own: GlobalTensor) -> GlobalTensor:
        stage = self._stages[id(own)]
        self._refuse_elsewhere(own, stage)
        view = self._view(own, self._renumbered_layout(own._spec, stage))
        view._is_param = True
        shard: Shard | None = own._optimizer_shard
        # Zero=3: the parameter's values are a shard, and units gather them
        if shard is not None and shard.spec is own._spec:
            of = spec_of(self.world, self._renumbered_layout(shard.of, stage), shard.of.shape)
            view._optimizer_shard = Shard.from_specs(of, view._spec, shard.region)
        return view

    def _refuse_elsewhere(self, parameter: torch.Tensor, stage: int) -> None:
        """Refuse a parameter that a program has put into the module since, of which this stage has no part."""
        of_stage = set(self._own_layouts.placements[stage])
        if isinstance(parameter, GlobalTensor) and set(parameter._spec.layout.placement) == of_stage:
            return
        lies = parameter._spec.layout if isinstance(parameter, GlobalTensor) else "a plain tensor"
        raise StrategyError(
            f"{self._names[id(parameter)]}: its layer is in stage {stage}, on ranks {sorted(of_stage)}, and the "
            f"parameter lies as {lies}. It came after wb.parallelize. Call it again, or use a schedule with 1 stage "
            "per rank (1f1b)."
        )

    def _renumbered_layout(self, spec: Spec, stage: int) -> Layout:
        return Layout(self._numbering.placement(stage, spec.layout.placement), spec.layout.sbp)

    def _view_buffers(self, module: nn.Module, resolved: ResolvedStrategy) -> None:
        choices = {choice.name: choice for choice in resolved.layers}
        nearest, views = resolved.layers[0], dict[tuple[int, Layout], GlobalTensor]()
        for name, submodule in module.named_modules():
            nearest = choices.get(name or ROOT, nearest)
            for short, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False):
                if not isinstance(buffer, GlobalTensor):  # a forward has made it
                    continue
                placement = self._layouts.placement_of_buffers(name or ROOT, submodule, nearest)
                own: Any = buffer
                layout = Layout(placement, (broadcast,) * placement.num_axes)
                if (id(own), layout) not in views:
                    views[id(own), layout] = self._view(own, layout)
                self._views.append((submodule._buffers, short, own, views[id(own), layout]))

    def _view(self, own: GlobalTensor, layout: Layout) -> GlobalTensor:
        """A tensor of the module with the stage's spec: the same storage, or a placeholder of another stage's."""
        spec = spec_of(self.world, layout, own._spec.shape)
        with local_torch():
            local = new_placeholder(spec.shape, own.dtype, self.world.device) if spec.is_placeholder else plain(own)
            return wrap(local.requires_grad_(own.requires_grad), spec)

    def refresh(self) -> bool:
        """Take over the memory and the gradients that parameters have; called before a step.

        False if the module holds other tensors now, or the world was rebuilt and messages of a failed step are void.
        """
        recorder = self.rank_world.context.recorder
        if self.world.num_rebuilds != self.rank_world.num_rebuilds:
            return False
        for cache in self._forward_caches:
            cache.begin_step()
        moved = dict[int, GlobalTensor]()
        for position, (holder, name, own, view) in enumerate(self._views):
            if holder.get(name) is not own:
                return False
            if recorder is not None:
                recorder.depends_on(own)
            with local_torch():
                has_moved = not view._spec.is_placeholder and view.data_ptr() != own.data_ptr()
                if view.requires_grad != own.requires_grad or (has_moved and not own._is_param):
                    return False
                if own._is_param:
                    if (view._spec.shape, view.dtype) != (own._spec.shape, own.dtype):
                        return False
                    if has_moved:  # other ranks do not see it, and keep the stage's world and what it has learnt
                        if id(own) not in moved:
                            moved[id(own)] = self._view_parameter(own)
                        view = moved[id(own)]
                        self._views[position] = holder, name, own, view
                    self._refuse_hooks(own)
                    gradient_state(view).placeholder = False
                    view.grad = None if view._spec.is_placeholder or own.grad is None else plain(own.grad)
        return True

    def _refuse_hooks(self, parameter: GlobalTensor) -> None:
        """Refuse hooks of parameters: a stage's backward sees its view of the parameter and would skip them."""
        if not (num_hooks := len(hooks_of(parameter))):
            return
        raise StrategyError(
            f"{self._names[id(parameter)]}: hooks registered: {num_hooks}, called: 0. With "
            f"several stages per rank a parameter's gradient comes from each stage's view of it. Change the gradient "
            f"after the step, or use a schedule with 1 stage per rank (1f1b)."
        )

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Context in which the module holds the stage's views, and this thread is the stage rank."""
        around = self.rank_world.context
        tracer = None if around.tracer is None else around.tracer.of_stage(self.world)
        observed = self.world.context.temporarily(
            tracer=tracer, recorder=around.recorder, implicit_boxing_allowed=around.implicit_boxing_allowed
        )
        layouts, caches = self._in_use.replaced_by(self._layouts), cached_forwards(self._forward_caches)
        for holder, name, _, view in self._views:
            holder[name] = view
        try:
            with layouts, observed, Simulated(self.world), caches:
                yield
        finally:
            for position in reversed(range(len(self._views))):
                holder, name, own, view = self._views[position]
                found: Any = holder.get(name)
                if found is not view and not own._is_param:  # the forward has replaced this buffer
                    if not isinstance(found, GlobalTensor):  # by a plain tensor, or has removed it
                        del self._views[position]
                        continue
                    left: Any = own if found._spec.is_placeholder else self.to_rank_world(found)
                    self._views[position] = (holder, name, left, found)
                    own = left
                holder[name] = own

    def to_rank_world(self, result: torch.Tensor) -> torch.Tensor:
        """A result of the stage with its spec on this rank; a placeholder of another stage may stay one."""
        if not isinstance(result, GlobalTensor):
            return result
        spec, placement = result._spec, result._spec.layout.placement
        grid = tuple(self._numbering.rank_of[rank] for rank in placement)
        is_everywhere = len(set(grid)) < len(grid)
        placement = (
            self._own_layouts.everywhere if is_everywhere else Placement(placement.device_type, grid, placement.shape)
        )
        there = spec_of(self.rank_world, Layout(placement, spec.layout.sbp), spec.shape)
        if spec.is_placeholder and not there.is_placeholder:
            return result
        with local_torch():
            if there.is_placeholder:
                return wrap(new_placeholder(there.shape, result.dtype, there.world.device), there)
            return wrap(plain(result), there)

    def write_gradients(self) -> None:
        """Give parameters the gradients of their views; under ZeRO 2, scatter them."""
        reducers = GradientReducer.of_all(own for _, _, own, _ in self._views)
        scattering = [reducer for reducer in reducers if reducer.scatters]
        with local_torch():
            for _, _, own, view in self._views:
                if not own._is_param:
                    continue
                if view._spec.is_placeholder:
                    has_grad = view._gradient.placeholder is not False
                    if own._spec.is_placeholder and has_grad and own._gradient.placeholder is False:
                        mark_placeholder(own)
                    continue
                known, found = read_grad(own), read_grad(view)
                if found is not None and (known is None or known.data_ptr() != found.data_ptr()):
                    accumulate_grad(own, plain(found))
                if GradientReducer.of(own) in scattering:  # others go on accumulating in the view
                    view.grad = None
        for reducer in scattering:
            reducer.scatter()


def _renumbered_layouts(layouts: StageLayouts, world: World, numbering: Numbering) -> StageLayouts:
    """The layouts of stages in terms of stage ranks."""
    seen = copy.copy(layouts)
    seen.world = world
    seen.plan = layouts.plan.on([numbering.placement(stage, like) for stage, like in enumerate(layouts.placements)])
    seen.everywhere = numbering.everywhere()
    return seen


def stage_ranks(module: nn.Module, state: ParallelState, world: World, stages: Sequence[int]) -> dict[int, StageRank]:
    """The stages of this rank, kept from step to step while the module holds the same tensors."""
    kept: dict[int, StageRank] = state.stage_ranks or {}
    still_right = [stage.refresh() for stage in kept.values()]
    if not still_right or not all(still_right):
        queues: MessageQueues = {}
        kept = {stage: StageRank(module, state, world, stage, queues) for stage in stages}
        state.stage_ranks, channels = kept, open_channels(module, state.resolved, world)
        for stage in kept.values():
            stage.transport.channels = channels
            stage.refresh()
    return kept
