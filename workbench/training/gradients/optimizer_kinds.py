"""What an optimizer's step may do: change each element alone, or call its closure at any time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from workbench.errors import LayoutError
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training.gradients.block_state import block_size_of
from workbench.training.gradients.nested_steps import optimizers_within

_ELEMENTWISE = {
    inspect.unwrap(kind.step)
    for kind in (
        torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax,
        torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
    )
}  # fmt: skip


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the step of each element depends on that element's gradient and state only.

    True for torch's elementwise optimizers and for classes that inherit their ``step``. Others have an attribute
    ``elementwise``.
    """
    said = getattr(optimizer, "elementwise", True if block_size_of(optimizer) else None)
    return is_of_torch(optimizer) if said is None else bool(said)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether the step is an elementwise one of torch's: it changes in place what has a gradient, and keeps that."""
    return inspect.unwrap(type(optimizer).step) in _ELEMENTWISE


def keeps_parts(optimizer: Optimizer) -> bool:
    """Whether plain tensors in the state of an optimizer are this rank's parts. Those that a step on global tensors
    makes are whole, such as Shampoo's statistics. A wrapper may show the state of an optimizer within it.
    """
    sharing = [each for each in optimizers_within(optimizer) if each.state is optimizer.state]
    return any(map(is_elementwise, (optimizer, *sharing)))


def calls_closure_later(
    optimizer: Optimizer, has_closure: bool, parameters: Sequence[GlobalTensor], is_sharded: bool
) -> bool:
    """Whether a step may call its closure at any time, so that it works on the global ``parameters`` themselves.

    torch's own steps (but for LBFGS), and elementwise ones, which take one gradient, call it once, before all else.
    Others may change weights before they call it, or call it again and again.

    Raises:
        LayoutError: it may, and ZeRO keeps shards; or it is LBFGS, and the parameters lie on several placements.
    """
    is_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
    if not parameters or not (has_closure or is_lbfgs):
        return False
    is_torchs = getattr(inspect.unwrap(type(optimizer).step), "__module__", "").startswith("torch.optim.")
    if not is_lbfgs and (is_torchs or is_elementwise(optimizer)):
        return False
    if is_sharded:
        step, does, fix = f"{type(optimizer).__name__}.step()", "evaluates the model several times in one step", ""
        if not is_lbfgs:
            step = step.replace("()", "(closure)")
            does = "may call its closure again, or after it has moved weights"
            fix = " If it calls its closure first and once, call it yourself: loss = closure(); optimizer.step()."
        raise LayoutError(
            f"{step}: {len(parameters)} parameters, sharded over the ranks by zero=, and an optimizer that {does}. "
            "Under zero=1 and zero=2 ranks update shards and gather them once per step. Leave zero= out of the "
            f"strategy, write zero=3, or use an optimizer that takes one gradient per step.{fix}"
        )
    placements = list(dict.fromkeys(p._spec.layout.placement for p in parameters))
    if is_lbfgs and not all(map(placements[0].has_ranks_of, placements)):
        raise LayoutError(
            f"{type(optimizer).__name__}.step(): {len(parameters)} parameters on {len(placements)} placements, "
            f"{' and '.join(map(str, placements))}. It joins all gradients to one vector, which lies on one placement. "
            "Leave the stages out of the strategy (data, model, zero=3), or use an optimizer that steps each parameter "
            "for itself."
        )
    return True


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step, of which the first is the optimizer."""
    found: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return found


def run_closure_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run a closure before the step, because it computes the gradients to reduce; the step gets its loss."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": lambda: loss}
    return (args[0], lambda: loss, *args[2:]), kwargs
