"""Optimizers inside a captured step: a replay calls them, on the same local parts, and they read their settings anew.

A learning rate is a Python number that changes between steps, and an optimizer computes others from its step count. A
recording would freeze them. So the recording pauses while an optimizer steps, and a replay calls the optimizer.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from workbench.errors import CaptureError
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training.gradients.fused_steps import fuse, unfuse
from workbench.training.gradients.nested_steps import optimizers_within, step_without_hooks
from workbench.training.gradients.optim import before_steps, state_beside
from workbench.training.gradients.optimizer_kinds import is_elementwise, is_of_torch
from workbench.training.gradients.state_on_host import closure_of_user
from workbench.training.gradients.step_hooks import count_hooks, readers_of

Settings: TypeAlias = list[dict[str, Any]]
"""Of each group of an optimizer."""


class OptimizerStep:
    """One optimizer's step in a program.

    It holds parts only if they are parameters: a step under ZeRO may make the others anew each time.

    Args:
        settings: those of the optimizer when the recording began; None if it was not known then.

    Attributes:
        owners: the parameter of each part that the optimizer changes, in the order of its groups.
    """

    def __init__(self, optimizer: Optimizer, args: Any, kwargs: Any, settings: Settings | None) -> None:
        _check(optimizer, args, kwargs)
        self.optimizer = optimizer
        self.sizes = [len(group["params"]) for group in optimizer.param_groups]
        swap = optimizer.__dict__.get("_workbench_swap")
        self._swap = swap
        owners = {} if swap is None else {id(part): owner for owner, part in swap.pairs}
        self.owners: list[Any] = [owners.get(id(part), part) for part in parts_of(optimizer)]
        self._settings = settings_of(optimizer) if settings is None else settings
        self._step: Callable[..., Any] = inspect.unwrap(type(optimizer).step)

    def fits(self) -> bool:
        """Whether the optimizer has the parameters that it had, in the layouts that they had, and still no hooks."""
        if count_hooks(self.optimizer):
            return False
        if self._swap is not None:
            return self._swap.fits(self.optimizer)
        params = parts_of(self.optimizer)
        return len(params) == len(self.owners) and all(map(operator.is_, params, self.owners))

    def __call__(self, parts: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        """Step on the parts with these gradients."""
        optimizer, owned = self.optimizer, self.optimizer.state
        groups = optimizer.param_groups
        held = [group["params"] for group in groups]
        state: Any = defaultdict(dict, state_beside(owned))
        for part, grad, owner in zip(parts, grads, self.owners, strict=True):
            part.grad = grad
            known = dict.get(owned, owner)
            if known is not None:
                state[part] = known
        start = 0
        for group, size in zip(groups, self.sizes, strict=True):
            group["params"] = list(parts[start : start + size])
            start += size
        optimizer.state = state
        fused = fuse(optimizer)
        places = [] if is_of_torch(optimizer) else [part.detach() for part in parts]
        try:
            self._call_readers(parts, held)
            on_host = None if self._swap is None else self._swap.on_host
            if on_host is None:
                step_without_hooks(optimizer, self._step)
            else:
                on_host.update(optimizer, self._step)
        finally:
            unfuse(fused)
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
            optimizer.state = owned
            for part, place in zip(parts, places, strict=False):
                if part.data_ptr() != place.data_ptr():  # part.data = ..., and the program works on the place
                    part.data = place.copy_(part)
            for part, owner in zip(parts, self.owners, strict=True):
                if part in state:
                    owned[owner] = state[part]
                if owner is not part:
                    part.grad = None
            owned.update(state_beside(state))
        optimizer.__dict__["_opt_called"] = True  # schedulers warn unless they see a step

    def _call_readers(self, parts: Sequence[torch.Tensor], held: list[Any]) -> None:
        """Call what reads sums of gradients in each step, as there; ``held``: the parameters of each group."""
        readers, swap = readers_of(self.optimizer), self._swap
        if not readers or swap is None:
            return
        known, plain = list(zip(self.owners, parts, strict=True)), swap.plain
        swap.held, swap.pairs = held, [pair for pair in known if isinstance(pair[0], GlobalTensor)]
        swap.plain = [part for owner, part in known if not isinstance(owner, GlobalTensor)]
        try:
            for reader in readers:
                reader(self.optimizer)
        finally:
            swap.held, swap.pairs, swap.plain = None, [], plain

    def check_settings(self) -> None:
        """Refuse, at the end of the recording, a setting that the step has changed: a replay would not change it."""
        now = settings_of(self.optimizer)
        changed = sorted(
            {
                name
                for old, new in zip(self._settings, now, strict=False)  # the step may have added a group
                for name in new
                if not _equal(old.get(name), new[name])
            }
        )
        if changed:
            raise CaptureError(
                f"capture: {', '.join(changed)} of {type(self.optimizer).__name__} changed within the step, as a "
                "scheduler's step() does. A replay runs no Python, so it would change in the recording and never "
                "again. Call the scheduler, or set group['lr'], outside of the captured function."
            )


def parts_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parts that an optimizer changes now, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    return bool(one == other)


def settings_of(optimizer: Optimizer) -> Settings:
    """The settings of an optimizer's groups, without those that say how a step is run."""
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k not in ("params", "fused")}
        for group in optimizer.param_groups
    ]


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    name = type(optimizer).__name__
    is_global = any(isinstance(p, GlobalTensor) for group in optimizer.param_groups for p in group["params"])
    if any(argument is not None for argument in (*args, *map(closure_of_user, kwargs.values()))):
        raise CaptureError(
            f"capture: {name}.step() was called with a closure. A replay calls the optimizer, which would run the step "
            "inside the step. Write the forward and backward into the captured function, then call step()."
        )
    if is_global or (not is_elementwise(optimizer) and "_workbench_swap" in optimizer.__dict__):
        raise CaptureError(
            f"capture: {name}.step() may read whole parameters (norms per layer, factored moments, several "
            "evaluations), which exchanges values inside the optimizer. A replay calls the optimizer on this rank's "
            "parts. Call step() outside of the captured function; or, if it changes each element by that element's "
            "gradient and state only, say so: elementwise = True in its class."
        )
    if not is_of_torch(optimizer) and (within := optimizers_within(optimizer)):
        raise CaptureError(
            f"capture: {name} has {len(within)} other optimizers, whose step() its own may call. A replay calls each "
            "optimizer on this rank's parts, and cannot call one within another. Call step() outside of the captured "
            "function, or step its optimizers there one after the other."
        )
    if num_hooks := count_hooks(optimizer):
        raise CaptureError(
            f"capture: {name} has {num_hooks} step hooks of its own or of all optimizers. A replay calls none of "
            "them. Remove them, or call step() outside of the captured function."
        )


class _Stepped(threading.local):
    """Of each thread, since simulated ranks are threads, and torch's hooks are global."""

    optimizers: list[Optimizer] | None = None


_stepped = _Stepped()


@contextmanager
def stepped_optimizers() -> Iterator[list[Optimizer]]:
    """Context that gives a list of the optimizers that step in this thread. There is one at a time."""
    _stepped.optimizers = found = list[Optimizer]()
    try:
        yield found
    finally:
        _stepped.optimizers = None


def notes_optimizers() -> bool:
    """Whether this thread is in the first call of a captured step, which notes what the step works on."""
    return _stepped.optimizers is not None


def _add_stepped(optimizer: Optimizer) -> None:
    if _stepped.optimizers is not None:
        _stepped.optimizers.append(optimizer)


before_steps.append(_add_stepped)
