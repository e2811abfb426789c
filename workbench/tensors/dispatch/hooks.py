"""Hooks of tensors and modules: they see global gradients, and what they return is boxed back to the dual layout.

A rank's own gradient may be one term of a sum, which no hook should see. On a placeholder the hook runs too, on a
placeholder of the gradient, so that what it communicates is communicated by all ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import BackwardHook

from workbench.core.layout import Layout
from workbench.errors import LayoutError
from workbench.tensors.boxing.box import box
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.registry import handler
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, new_placeholder, wrap
from workbench.tensors.leaf_gradients import mark_placeholder_leaves
from workbench.tensors.patch_table import patch
from workbench.tensors.tensor_state import gradient_state
from workbench.tensors.world import World


class GradientConversion:
    """Turns this rank's gradient of one tensor into a global one, and back."""

    def __init__(self, tensor: GlobalTensor) -> None:
        self.spec: Spec = tensor._spec
        self.dtype = tensor.dtype

    def to_global(self, local: torch.Tensor | None) -> Any:
        """The global gradient; None where no rank has one."""
        spec = self.spec.dual
        if local is None:
            is_placeholder = spec.is_placeholder
            return wrap(new_placeholder(spec.shape, self.dtype, spec.world.device), spec) if is_placeholder else None
        with local_torch():
            return wrap(local.view_as(local).as_subclass(torch.Tensor), spec)

    def to_local(self, result: Any, local: torch.Tensor | None) -> torch.Tensor | None:
        """The result of a hook as this rank's gradient; None on a placeholder, where autograd takes no other."""
        if result is None:
            return None
        if tuple(result.shape) != tuple(self.spec.shape):
            raise RuntimeError(
                f"a hook returned a gradient of shape {tuple(result.shape)} for a tensor of shape "
                f"{tuple(self.spec.shape)}. Both are logical shapes and must agree: return the gradient of the whole."
            )
        layout: Layout = self.spec.dual.layout
        if not isinstance(result, GlobalTensor):
            result = from_local(result, self.spec.world, layout)
        result = box(result, layout)
        if local is None:
            return None
        with local_torch():
            return result.view_as(result).as_subclass(torch.Tensor)


@handler("register_hook")
def register_hook(func: Any, args: Any, kwargs: Any) -> Any:
    """``tensor.register_hook(hook)``."""
    tensor, hook = args[0], kwargs.get("hook", args[1] if len(args) > 1 else None)
    on_shard = _seeing_globals(tensor, hook)
    with local_torch():
        return func(tensor, on_shard)


def _seeing_globals(tensor: GlobalTensor, hook: Callable[[Any], Any]) -> Callable[[Any], torch.Tensor | None]:
    """The hook that torch calls. A leaf may have got another layout since its hook was set.

    Of other tensors torch gives the gradient from before later changes in place.
    """
    at_first, reference = GradientConversion(tensor), weakref.ref(tensor)
    with local_torch():
        is_leaf, is_param = tensor.is_leaf, tensor._is_param

    @functools.wraps(hook, updated=())
    def on_shard(local: torch.Tensor | None) -> torch.Tensor | None:
        leaf = reference() if is_leaf else None
        conversion = at_first if leaf is None or leaf._spec is at_first.spec else GradientConversion(leaf)
        with conversion.spec.world.context.temporarily(in_parameter_hook=is_param):
            return conversion.to_local(hook(conversion.to_global(local)), local)

    return on_shard


def _register_on_any(self: torch.Tensor, hook: Callable[[Any], Any]) -> Any:
    """``Tensor.register_hook``; of what a hook on a plain tensor returns, the whole value."""

    @functools.wraps(hook, updated=())
    def whole(grad: Any) -> Any:
        result = hook(grad)
        is_for_plain = isinstance(result, GlobalTensor) and not isinstance(grad, GlobalTensor)
        return result.full_tensor() if is_for_plain else result

    return _register_hook(self, hook if isinstance(self, GlobalTensor) else whole)


_register_hook = torch.Tensor.register_hook
functools.update_wrapper(_register_on_any, _register_hook)


@handler("register_post_accumulate_grad_hook")
def register_post_accumulate_grad_hook(func: Any, args: Any, kwargs: Any) -> Any:
    """``leaf.register_post_accumulate_grad_hook(hook)``; the hooks run when the backward ends, as registered.

    Which of two leaves gets its gradient first may differ between ranks, and a hook may communicate (an optimizer's
    step does): so they wait for one another. In a scheduled step they wait for the end of the micro-batch, whose
    gradients may come in two halves and are scattered behind the backward (ZeRO 2).
    """
    tensor, hook = args[0], kwargs.get("hook", args[1] if len(args) > 1 else None)
    at_the_end = AfterAccumulation(hook)
    with local_torch():
        handle = func(tensor, at_the_end)
    at_the_end.number = handle.id
    return handle


class AfterAccumulation:
    """The hook that torch calls after accumulation: it queues the user's hook until the backward ends."""

    number: int

    def __init__(self, hook: Callable[[Any], None]) -> None:
        self.__wrapped__ = hook

    def __call__(self, leaf: GlobalTensor) -> None:
        world = leaf._spec.world
        running = world.context.running
        waiting = _behind_this_backward(world) if running is None else running.hooks
        waiting[self.number] = partial(self.__wrapped__, leaf)


class _Waiting(dict[int, Callable[[], None]]):
    """Hooks to run when a backward ends, which holds them; one that raises drops them."""


_waiting: weakref.WeakValueDictionary[tuple[int, int], _Waiting] = weakref.WeakValueDictionary()
"""By world and backward."""


def _behind_this_backward(world: World) -> _Waiting:
    key = id(world), torch._C._current_graph_task_id()
    waiting = _waiting.get(key)
    if waiting is None:
        waiting, grad_mode = _Waiting(), torch.is_grad_enabled()
        _waiting[key] = waiting
        torch.autograd.Variable._execution_engine.queue_callback(partial(run_hooks, waiting, grad_mode))
    return waiting


def run_hooks(waiting: dict[int, Callable[[], None]], grad_mode: bool = False) -> None:
    """Run hooks after accumulation, in the order in which they were registered."""
    with torch.set_grad_enabled(grad_mode):
        for _, run in sorted(waiting.items()):
            run()


def hooks_of(parameter: Any) -> list[Any]:
    """The user's hooks on a parameter's gradient."""
    with local_torch():
        before, after = parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}
    return [*before.values(), *(hook for hook in after.values() if isinstance(hook, AfterAccumulation))]


def move_hooks(old: Any, new: Any) -> None:
    """Give the hooks of a plain leaf to the global tensor that takes its place. Their handles remove them there."""
    with local_torch():
        before, after = old._backward_hooks, old._post_accumulate_grad_hooks
        if before:
            for number, hook in before.items():
                before[number] = _seeing_globals(new, hook)
            old._backward_hooks, new._backward_hooks = None, before
        if after:
            for number, hook in after.items():
                after[number] = AfterAccumulation(hook)
                after[number].number = number
            old._post_accumulate_grad_hooks, new._post_accumulate_grad_hooks = None, after


@handler("retain_grad")
def retain_grad(func: Any, args: Any, kwargs: Any) -> None:
    """``tensor.retain_grad()``; a placeholder records that its owner has a gradient."""
    tensor = args[0]
    with local_torch():
        if tensor._spec.is_placeholder and tensor.requires_grad and not tensor.is_leaf:
            reference = weakref.ref(tensor)

            def record(local: torch.Tensor | None) -> None:
                placeholder = reference()
                if placeholder is not None and placeholder._gradient.placeholder is False:
                    gradient_state(placeholder).placeholder = True

            tensor.register_hook(record)
        func(tensor)


class _HookPoint(torch.autograd.Function):
    """The node of a module's backward hooks: passes all operands on."""

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[operand for operand in operands if not operand.requires_grad])
        return tuple(operand.view_as(operand) for operand in operands)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mark_placeholder_leaves(ctx)
        return grads


_HookPoint.__name__ = "BackwardHookFunction"
"""torch's ``BackwardHook`` looks for its own node by this name."""


class GlobalBackwardHook(BackwardHook):
    """torch's ``BackwardHook`` for a module that is called with global tensors."""

    def __init__(self, module: Any, user_hooks: Any, user_pre_hooks: Any) -> None:
        super().__init__(module, user_hooks, user_pre_hooks)
        self._input_conversions: dict[int, GradientConversion] = {}
        self._output_conversions: dict[int, GradientConversion] = {}

    def setup_input_hook(self, args: Any) -> Any:
        """Put the node of the inputs; remember how their gradients lie."""
        self._input_conversions = _conversions(args)
        self.user_hooks = [self._seeing_globals(hook) for hook in self.user_hooks]
        return super().setup_input_hook(args)

    def setup_output_hook(self, args: Any) -> Any:
        """Put the node of the outputs; remember how their gradients lie."""
        self._output_conversions = _conversions(args if isinstance(args, tuple) else (args,))
        self.user_pre_hooks = [self._seeing_globals_before(hook) for hook in self.user_pre_hooks]
        return super().setup_output_hook(args)

    def _apply_on_tensors(self, fn: Callable[[Any], None], args: Any) -> Any:
        if not any(isinstance(arg, GlobalTensor) for arg in args):
            return super()._apply_on_tensors(fn, args)
        positions = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        with local_torch():
            if not (torch.is_grad_enabled() and any(args[i].requires_grad for i in positions)):
                return args, None
            passed = _HookPoint.apply(*(args[i] for i in positions))
            fn(next(t.grad_fn for t in passed if t.grad_fn is not None))
        changed = list(args)
        for position, tensor in zip(positions, passed, strict=True):
            original = args[position]
            changed[position] = wrap(tensor, original._spec) if isinstance(original, GlobalTensor) else tensor
        return (tuple(changed) if type(args) is tuple else type(args)(*changed)), positions

    def _seeing_globals(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def on_shards(module: Any, grad_inputs: Any, grad_outputs: Any) -> Any:
            inputs = _to_global(self._input_conversions, grad_inputs)
            outputs = _to_global(self._output_conversions, grad_outputs)
            return _to_local(self._input_conversions, hook(module, inputs, outputs), grad_inputs)

        return on_shards

    def _seeing_globals_before(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def on_shards(module: Any, grad_outputs: Any) -> Any:
            outputs = _to_global(self._output_conversions, grad_outputs)
            return _to_local(self._output_conversions, hook(module, outputs), grad_outputs)

        return on_shards


def _conversions(args: Any) -> dict[int, GradientConversion]:
    with local_torch():
        learning = [(i, arg) for i, arg in enumerate(args) if isinstance(arg, GlobalTensor) and arg.requires_grad]
        return {i: GradientConversion(arg) for i, arg in learning}


def _to_global(conversions: dict[int, GradientConversion], grads: Any) -> Any:
    if grads is None:
        return None
    return tuple(conversions[i].to_global(grad) if i in conversions else grad for i, grad in enumerate(grads))


def _to_local(conversions: dict[int, GradientConversion], results: Any, grads: Any) -> Any:
    if results is None or len(results) != len(grads):
        return results
    return tuple(
        conversions[i].to_local(result, grad) if i in conversions else result
        for i, (result, grad) in enumerate(zip(results, grads, strict=True))
    )


_torch_warning = torch.nn.Module._maybe_warn_non_full_backward_hook


def _refuse_non_full_hook(module: Any, inputs: Any, result: Any, grad_fn: Any) -> None:
    """``register_backward_hook`` of old hangs on a node of the graph and would see this rank's terms."""
    leaves = tree_leaves((inputs, result))
    tensor = next((leaf for leaf in leaves if isinstance(leaf, GlobalTensor)), None)
    if tensor is not None:
        raise LayoutError(
            f"{type(module).__name__} has a hook of register_backward_hook and is called with a global tensor of shape "
            f"{tuple(tensor._spec.shape)}, {tensor._spec.layout}. Such a hook sees this rank's terms of a "
            "gradient, and of the last function only. Use register_full_backward_hook."
        )
    _torch_warning(module, inputs, result, grad_fn)


patch(
    "torch.nn.modules.module.BackwardHook",
    "backward hooks of a module would see this rank's terms of gradients",
    lambda torchs_own: GlobalBackwardHook,
)
patch(
    "torch.nn.Module._maybe_warn_non_full_backward_hook",
    "hooks of register_backward_hook would see this rank's terms of the last function's gradient",
    lambda torchs_own: _refuse_non_full_hook,
)
patch(
    "torch.Tensor.register_hook",
    "a plain tensor's gradient would become this rank's shard of what its hook returns",
    lambda torchs_own: _register_on_any,
)
