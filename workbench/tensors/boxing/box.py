"""Executes a boxing plan on this rank, as one differentiable function.

The backward of ``a -> b`` is the boxing ``dual(b) -> dual(a)``: all-gather <-> reduce-scatter, slice <-> zero-fill,
all-reduce <-> all-reduce, all-to-all <-> all-to-all. It is a boxing too, so double backward works.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from workbench.core.boxing import BoxingPlan, describe_sbp_change
from workbench.core.boxing_path import BoxingPath, find_boxing_path
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Partial
from workbench.errors import LayoutError
from workbench.tensors.boxing.exchange import exchange_between, without_view_relations
from workbench.tensors.boxing.explicit import Need, check_explicit
from workbench.tensors.global_tensor import (
    GlobalTensor,
    Spec,
    local_torch,
    new_placeholder,
    spec_of,
    wrap,
)
from workbench.tensors.leaf_gradients import mark_placeholder_leaves
from workbench.tensors.tensor_state import applying, spread_zero, version_of


def box(tensor: GlobalTensor, layout: Layout, function: str = "") -> GlobalTensor:
    """``tensor`` in another layout; on ranks outside the new placement, a placeholder. All ranks of the world call it.

    The result owns its storage. If the tensor has the layout already, the result is the tensor itself. ``function`` is
    the function that needs the boxing, for traces.
    """
    source = tensor._spec
    return box_to(tensor, spec_of(source.world, layout, source.shape), function)


def box_to(tensor: GlobalTensor, target: Spec, function: str = "") -> GlobalTensor:
    """``box`` to the layout of a spec that has the tensor's shape."""
    source = tensor._spec
    if target is source:
        return tensor
    context = source.world.context
    tag, context.latest = context.next_tag(), (source, target, function)
    if context.running is not None:
        context.running.add_edge(tensor, target, function, tag)
    site = _trace_forward(tensor, source, target, function) if context.tracer is not None else None
    with local_torch():
        if tensor.requires_grad and torch.is_grad_enabled():
            check_differentiable(source, target, function)
            return wrap(_apply_box(tensor, source, target, tag, site), target)
        with without_view_relations():
            made = exchange_between(source, target, tensor.dtype).run(tensor, tag)
        return wrap(made, target)


def box_placeholder(placeholder: torch.Tensor, target: Spec, tag: int) -> GlobalTensor:
    """``box_to`` of a tensor that this rank holds neither before nor after, under a tag that was drawn already."""
    source: Spec = placeholder._spec  # type: ignore[attr-defined]
    with local_torch():
        if placeholder.requires_grad and torch.is_grad_enabled():
            return wrap(_apply_box(placeholder, source, target, tag), target)
        return wrap(new_placeholder(target.shape, placeholder.dtype, source.world.device), target)


def _trace_forward(tensor: GlobalTensor, source: Spec, target: Spec, function: str) -> Any:
    tracer = source.world.context.tracer
    site = tracer.site(function)
    # A backward boxes the gradient of a plain tensor that became global
    in_backward = torch._C._current_graph_task_id() >= 0
    tracer.add(site, "backward" if in_backward else "forward", plan_of(source, target, tensor), tensor.dtype)
    return site


def check_differentiable(source: Spec, target: Spec, function: str) -> None:
    """Raise ``LayoutError`` for a maximum of terms that requires a gradient, here and not deep in backward."""
    for entry in (*source.layout.sbp, *target.layout.sbp):
        if isinstance(entry, Partial) and entry.reduction != "sum":
            raise LayoutError(
                f"{function or 'to_global'}: boxing {describe_sbp_change(source.layout, target.layout)} of "
                f"{tuple(source.shape)}, a tensor that requires a gradient. {entry} is not differentiable: only sums "
                f"are linear. Write x.detach().to_global(...), or take x.to_global(sbp=wb.sbp.broadcast) and "
                f"torch.a{entry.reduction}, which has a gradient."
            )


def box_implicitly(tensor: GlobalTensor, layout: Layout, function: str) -> GlobalTensor:
    """A boxing that an operation needs and the code does not write. The source caches it, so q, k and v share one.

    The source holds the result strongly: with weak references, communication would depend on one rank's garbage
    collector. In a scheduled step it keeps one for each placement until the micro-batch ends (``MicroBatchBoxings``).
    """
    source = tensor._spec
    if source.layout == layout:
        return tensor
    if not source.world.context.implicit_boxing_allowed:
        check_explicit(function, [Need("an operand", tensor, layout)])
    state = _state_of(tensor, layout.placement)
    if state is None:
        return box(tensor, layout, function)
    boxed = None if tensor._boxings is None else tensor._boxings.get((layout, state))
    if boxed is None:
        boxed = box(tensor, layout, function)
        _keep(tensor, boxed, state)
    elif (running := source.world.context.running) is not None:
        running.add_reuse(tensor, boxed, function)
    if (micro_batch := state[-1]) is not None:
        micro_batch.count_use(boxed)
    return boxed


class MicroBatchBoxings:
    """The key of boxings that tensors keep for one micro-batch of a stage: only its forward and backward find them.

    Between these two, each rank runs other actions. What they leave on tensors that outlive a micro-batch, such as
    buffers, must not decide which boxings a function that runs again calls.
    """

    def __init__(self) -> None:
        self._sources: list[weakref.ref[GlobalTensor]] = []
        self.num_uses = 0

    def count_use(self, boxed: GlobalTensor) -> None:
        """Count that an operation takes a boxing, be it new or kept."""
        self.num_uses += 1
        boxed._last_use = self.num_uses

    def add(self, tensor: GlobalTensor) -> None:
        """Note that a tensor keeps boxings for this micro-batch."""
        self._sources.append(weakref.ref(tensor))

    def end(self) -> None:
        """Let tensors forget them."""
        for source in self._sources:
            if (tensor := source()) is not None and tensor._boxings:
                kept = {key: boxed for key, boxed in tensor._boxings.items() if key[1][-1] is not self}
                tensor._boxings = kept or None


def _keep(tensor: GlobalTensor, boxed: GlobalTensor, state: tuple[Any, ...]) -> None:
    layout, micro_batch, others = boxed._spec.layout, state[-1], dict[Any, Any]()
    if (recorder := tensor._spec.world.context.recorder) is not None:
        recorder.keeps_boxings(tensor)
    if micro_batch is not None:
        micro_batch.add(tensor)
        others = {
            key: other
            for key, other in (tensor._boxings or {}).items()
            if key[0].placement != layout.placement or key[1][-1] is not micro_batch
        }
    tensor._boxings = {**others, (layout, state): boxed}


def kept_boxings(tensor: GlobalTensor, after: int = -1) -> list[GlobalTensor]:
    """The results of implicit boxings that a tensor keeps and that are valid now. In a scheduled step ``after`` leaves
    out those without a use after this number of uses.
    """
    if not tensor._boxings:
        return []
    now = _state_of(tensor)
    return [boxed for (_, state), boxed in tensor._boxings.items() if state == now and boxed._last_use > after]


def keep_boxing(tensor: GlobalTensor, boxed: GlobalTensor) -> None:
    """Let a tensor keep the result of an implicit boxing, made of another tensor with its layout and values."""
    if (state := _state_of(tensor)) is not None:
        _keep(tensor, boxed, state)


def cached_boxing_on(tensor: GlobalTensor, placement: Placement) -> GlobalTensor | None:
    """The result of an earlier implicit boxing to a placement, in any layout; None if there is none."""
    if not tensor._spec.world.context.implicit_boxing_allowed:
        return None
    boxed = next((kept for kept in kept_boxings(tensor) if kept._spec.layout.placement == placement), None)
    if boxed is not None and (running := tensor._spec.world.context.running) is not None:
        running.add_reuse(tensor, boxed, "")
        if running.boxings is not None:
            running.boxings.count_use(boxed)
    return boxed


def _state_of(tensor: GlobalTensor, target: Placement | None = None) -> tuple[Any, ...] | None:
    """The state of a tensor that a cached boxing is valid for; None for tensors whose boxings (to the placement
    ``target``) are not cached.
    """
    if tensor._is_grad:  # autograd writes to it on its own rank only, and other ranks do not know
        return None
    with local_torch():
        world = tensor._spec.world
        running = world.context.running
        micro_batch = None if running is None else running.boxings
        # A leaf and its cached boxing keep each other alive through autograd, until the micro-batch ends.
        # A tensor of inference mode has no version, so later writes to it are not seen.
        is_leaf = tensor._is_param or (torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf)
        stays = micro_batch is None or target == tensor._spec.layout.placement
        if (is_leaf and stays) or tensor.is_inference():
            return None
        # A step that is being recorded must not use an earlier step's boxings. Nor may a rank use one from before the
        # world was rebuilt: others may have been interrupted before they had it.
        here = world.num_rebuilds, world.context.recorder, micro_batch
        return version_of(tensor), torch.is_grad_enabled(), tensor.requires_grad, tensor.dtype, *here


def plan_of(source: Spec, target: Spec, local: torch.Tensor) -> BoxingPlan | BoxingPath:
    """The plan or path that ``exchange_between`` executes."""
    with local_torch():
        itemsize = local.element_size()
    return find_boxing_path(source.layout, target.layout, source.shape, itemsize, source.world.transport.cost)


class Box(torch.autograd.Function):
    """Boxing between two specs. Every rank of the world has the node, so backward reaches it on every rank."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, source: Spec, target: Spec, tag: int, site: Any = None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.boxing = (source, target, tag, local.dtype, local.device, site)
        with without_view_relations():
            return exchange_between(source, target, local.dtype).run(local, tag)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        source, target, tag, dtype, device, site = ctx.boxing
        if source.is_placeholder:
            mark_placeholder_leaves(ctx)
        incoming, outgoing = target.dual, source.dual
        grad = grads[0]
        if grad is None:  # a placeholder's gradient, or no gradient: this rank adds zeros
            grad = spread_zero(incoming.local_shape, dtype, device)
        result = box_gradient(grad, incoming, outgoing, tag | 1, site)
        # A placeholder has no gradient to keep, and autograd would clone one for a leaf into full storage; only a
        # gradient that is differentiated again must be linked to this boxing.
        is_lost = outgoing.is_placeholder and not torch.is_grad_enabled()
        return (None if is_lost else result), None, None, None, None


_apply_box = applying(Box)


def box_gradient(grad: torch.Tensor, incoming: Spec, outgoing: Spec, tag: int, site: Any = None) -> torch.Tensor:
    """The boxing of a gradient, linked to it if it is differentiated again. ``site`` is its line in traces."""
    context = incoming.world.context
    tracer, running = context.tracer, context.running
    if running is not None and running.edges is not None:  # a later backward goes this way, if it has a history
        running.check_edge(incoming, outgoing, None, torch.is_grad_enabled())
    if tracer is not None:
        tracer.add(site or tracer.site(), "backward", plan_of(incoming, outgoing, grad), grad.dtype)
    if torch.is_grad_enabled():
        made: torch.Tensor = _apply_box(grad, incoming, outgoing, tag, site)
        return made
    return exchange_between(incoming, outgoing, grad.dtype).run(grad, tag)
