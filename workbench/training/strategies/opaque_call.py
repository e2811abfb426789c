"""A differentiable function that a recording of ``wb.capture`` has as one call, forward and backward.

A replay runs it anew, in Python, so that its sizes may depend on values: of experts, the numbers of rows that go from
rank to rank. It keeps its own graph of autograd from forward to backward. In a block that runs again in backward, the
forward keeps no graph: backward has the inputs again, and runs the function once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from workbench.errors import CaptureError
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.world import World
from workbench.transport.traffic import TrafficCount

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def opaque_call(
    world: World, name: str, function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """``function(*tensors)``, which draws no random numbers; as one call if this rank's step is being recorded."""
    if world.context.recorder is None:
        return function(*tensors)
    call = _Function(world, name, function)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        made: torch.Tensor = _Opaque.apply(call, *tensors)
        return made
    result: torch.Tensor = world.context.recorder.call(name, call.forward, *tensors)
    return result


class _Function:
    """The function with the settings that it was recorded under: those of autocast, and which gradients it has."""

    def __init__(self, world: World, name: str, function: Callable[..., torch.Tensor]) -> None:
        self.world, self.name, self._function = world, name, function
        kind = world.autocast_type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.needs_grad: tuple[bool, ...] = ()
        self._has_grad: tuple[bool, ...] | None = None

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The result alone."""
        with self._as_recorded(), torch.no_grad():
            return self._function(*tensors)

    def forward_with_backward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, Callable[..., Any]]:
        """The result, and the function from its gradient to those of ``tensors`` that have one."""
        with self._as_recorded(), torch.enable_grad():
            given = [t.detach().requires_grad_(needs) for t, needs in zip(tensors, self.needs_grad, strict=True)]
            result = self._function(*given)
        leaves = [tensor for tensor in given if tensor.requires_grad]

        def backward(grad: torch.Tensor) -> Sequence[torch.Tensor | None]:
            with self._as_recorded():
                return self._checked(leaves, torch.autograd.grad(result, leaves, grad, allow_unused=True))

        return result.detach(), backward

    def backward_again(self, grad: torch.Tensor, *tensors: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """The gradients, with another forward."""
        _, backward = self.forward_with_backward(*tensors)
        return backward(grad)

    def _checked(
        self, leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """The same gradients in every replay as in the recording."""
        if self._has_grad is None:
            self._has_grad = tuple(grad is not None for grad in grads)
        for known, grad in zip(self._has_grad, grads, strict=True):
            if grad is not None and not known:
                raise CaptureError(
                    f"capture: {self.name} has a gradient for {sum(g is not None for g in grads)} of its tensors, and "
                    f"had one for {sum(self._has_grad)} when the step was recorded. A replay has the gradients of its "
                    "recording: let the layer use all of its weights in each call, or leave the capture out."
                )
        made = zip(leaves, self._has_grad, grads, strict=True)
        return [torch.zeros_like(leaf) if has and grad is None else grad for leaf, has, grad in made]

    @contextmanager
    def _as_recorded(self) -> Iterator[None]:
        """The context of the function, in a recording and in a replay; hooks and modes around the step see nothing
        of it. A replay counts its exchanges by itself.
        """
        recorder, before = self.world.context.recorder, TrafficCount.so_far(self.world.traffic)
        kind, dtype, is_enabled = self._autocast
        with (
            hidden_from_modes(),
            saved_tensors_hooks(lambda value: value, lambda value: value),
            torch.autocast(kind, dtype, is_enabled, cache_enabled=False),
        ):
            yield
        if recorder is not None:
            recorder.counted_by_calls.append(before.until(self.world.traffic))


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Function, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.call, call.needs_grad = call, ctx.needs_input_grad[1:]
        recorder, hooks = call.world.context.recorder, _top_hooks(True)
        ctx.runs_again = hooks is not None and not getattr(getattr(hooks[0], "__self__", None), "only_moves", False)
        result: torch.Tensor
        if ctx.runs_again:
            ctx.save_for_backward(*tensors)
            result = recorder.call(call.name, call.forward, *tensors)
        else:
            result, ctx.ends = recorder.call(call.name, call.forward_with_backward, *tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call, recorder = ctx.call, ctx.call.world.context.recorder
        if ctx.runs_again:
            found = iter(recorder.call(f"{call.name} ends", call.backward_again, grads[0], *ctx.saved_tensors))
        elif ctx.ends is None:
            raise CaptureError(
                f"capture: 2 backwards go through {call.name} (retain_graph=True), and a captured step keeps its graph "
                "for 1. Add the losses and call backward once, or leave the capture out."
            )
        else:
            found, ctx.ends = iter(ctx.ends(grads[0])), None
        return None, *(next(found) if needs else None for needs in call.needs_grad)
