"""Plain torch optimizers on global parameters: gradients are reduced in buckets, and steps run on local shards.

Before an optimizer's step, behind hooks of the user, the local part with the reduced gradient takes the place of each
global parameter. After the step, before hooks of the user, the parameters return. So hooks see the parameters, those
after a step read new values, and an exception in one leaves no rank with old weights. An elementwise optimizer, fused
or foreach, works on plain local tensors. An optimizer that is not known to be elementwise (norms per layer, factored
moments) steps on global tensors, so its norms are those of the whole; ``optimizer.elementwise = True`` (or the class
attribute) says that it may have the local parts.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workbench.core.layout import Layout
from workbench.errors import LayoutError
from workbench.kernels.blocks import slice_region
from workbench.tensors import world
from workbench.tensors.execution_context import ExecutionContext
from workbench.tensors.global_tensor import GlobalTensor, local_torch, new_placeholder, plain, wrap
from workbench.tensors.leaf_gradients import set_reduced_grad
from workbench.tensors.patch_table import hook, patch
from workbench.training.gradients.block_state import block_size_of, check_blocks, make_block_state
from workbench.training.gradients.fused_steps import fuse, unfuse
from workbench.training.gradients.nested_steps import is_nested, is_within_step
from workbench.training.gradients.optimizer_kinds import calls_closure_later, closure_of, run_closure_first
from workbench.training.gradients.reduction import forget_sums, start_reduction, write_back
from workbench.training.gradients.shard import is_first_holder, shard_of, state_spec
from workbench.training.gradients.stale_optimizer import check_not_replaced, check_state_layouts, mark_stateful, part_of
from workbench.training.gradients.step_hooks import put_behind_hooks, readers_of, remove_from_hooks
from workbench.training.gradients.swap import Swap

before_steps: list[Callable[[Optimizer], None]] = []
"""Called when an optimizer is about to step."""
_stepping: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
"""Optimizers with local parts in place of their parameters, by their ids."""


def forget_layouts(optimizer: Optimizer) -> None:
    """What an optimizer has as state is new: it lies where its parameters lie now."""
    optimizer.__dict__.pop("_workbench_swap", None)
    mark_stateful(optimizer)


def state_beside(state: Any) -> dict[Any, Any]:
    """What an optimizer keeps in its state beside that of parameters: under keys that are no tensors."""
    return {key: value for key, value in dict.items(state) if not isinstance(key, torch.Tensor)}


def state_layout(parameter: GlobalTensor) -> Layout:
    """The layout of an optimizer's per-element state of ``parameter``: the parameter's, or its shard's under ZeRO.

    ``optimizer.state[parameter]`` holds this rank's part as plain tensors. An optimizer that is not elementwise has
    global tensors there.
    """
    return state_spec(parameter).layout


def restore_parameters() -> None:
    """Return to optimizers the parameters of interrupted steps; otherwise ``zero_grad`` would miss them.

    Nothing is sent. Where ZeRO keeps shards, the other ranks' copies are those of the last complete step.
    """
    for optimizer in _in_a_step():
        put_back(optimizer, sends=False)


def _in_a_step() -> list[Optimizer]:
    """Optimizers of all threads. Other threads may begin and end steps meanwhile."""
    return [optimizer for ref in _stepping.valuerefs() if (optimizer := ref()) is not None]


_torch_zero_grad: Callable[..., None] = Optimizer.zero_grad


@functools.wraps(_torch_zero_grad)
def _zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    """A step that raised has left local tensors behind, of whose gradients nobody asks."""
    put_back(self)
    parameters = [p for group in self.param_groups for p in group["params"]]
    if not set_to_none or not all(isinstance(p, GlobalTensor) for p in parameters):
        _torch_zero_grad(self, set_to_none)
        return
    for parameter in parameters:  # torch reads each gradient first: twice the time for placeholders
        parameter.grad = None


def _before_hooks(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_nested(optimizer):
        return
    put_back(optimizer)  # after a step that raised, its local tensors are still in place
    _end_others(optimizer)
    put_behind_hooks(optimizer, _before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    if is_nested(optimizer):
        return None
    swap = _swap_of(optimizer)
    if swap.plain:
        check_not_replaced(f"{type(optimizer).__name__}.step()", [*swap.plain, *swap.parameters])
    context = _context()
    has_closure = closure_of(args, kwargs) is not None
    calls_later = calls_closure_later(optimizer, has_closure, swap.parameters, swap.is_sharded)
    if not swap.parameters or calls_later or swap.uses_parameters:  # it works on the parameters themselves
        for reducer in swap.reducers:
            reducer.drain()  # the step may change gradients, which are in flight
        context.begin_action("O")
        _call_listeners(context, optimizer, args, kwargs)
        return None
    args, kwargs = run_closure_first(args, kwargs)
    context.begin_action("O")
    for reducer in swap.reducers:
        reducer.before_step()
    finish = start_reduction(swap.present)
    if optimizer.state is not swap.state:
        _adopt_state(optimizer, swap)
    with local_torch():  # meanwhile the sums are in flight
        pairs = [(p, _part(p)) for p in swap.stepping]
    with torch.no_grad():
        sums = finish()
        for reducer in swap.reducers:
            reducer.drain()
        if swap.elementwise:
            with local_torch():
                for parameter, local in pairs:
                    grad = sums.get(parameter)
                    # torch's fused step assumes contiguous memory.
                    local.grad = None if grad is None else grad.contiguous()
        else:
            pairs = [(p, _wrapped(p, local, sums.get(p))) for p, local in pairs]
    _exchange_places(optimizer, swap, pairs)
    if swap.on_host is not None:
        args, kwargs = swap.on_host.in_closure(optimizer, swap.step, args, kwargs)
    _call_listeners(context, optimizer, args, kwargs)
    return args, kwargs


def _swap_of(optimizer: Optimizer) -> Swap:
    """That of the step before, or a new one, where parameters or layouts have changed."""
    swap: Swap | None = optimizer.__dict__.get("_workbench_swap")
    if swap is not None and swap.fits(optimizer):
        return swap
    if swap is not None and optimizer.state is swap.state:
        check_state_layouts(optimizer, swap.parameters, swap.specs)
    swap = optimizer.__dict__["_workbench_swap"] = Swap(optimizer)
    check_blocks(optimizer, swap.parameters)
    mark_stateful(optimizer)
    return swap


def _call_listeners(
    context: ExecutionContext, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if context.recorder is not None:
        context.recorder.optimizer_begins(optimizer, args[1:], kwargs)
    for reader in (*before_steps, *readers_of(optimizer)):
        reader(optimizer)


def _end_others(optimizer: Optimizer) -> None:
    """Put back parameters of an optimizer that is about to step, which a step of another one that raised has replaced.

    Raises:
        LayoutError: the other step is not over: it calls this one, and its local parts are in use.
    """
    for other in _in_a_step():
        swap: Swap = other.__dict__["_workbench_swap"]
        held = {id(tensor) for tensor in (*swap.parameters, *(part for _, part in swap.pairs))}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        shared = sum(id(parameter) in held for parameter in parameters)
        if shared and is_within_step(other):
            inner, outer = type(optimizer).__name__, type(other).__name__
            raise LayoutError(
                f"{inner}.step(): called by {outer}.step(), which has {shared} of its {len(parameters)} parameters, "
                f"too. {outer} steps on this rank's parts of them, as it is not known to step another optimizer. Let "
                f"{outer} have the {inner} as an attribute, alone or in a list, from when it is made."
            )
        if shared:
            put_back(other)


def stepping_gradients(optimizer: Optimizer) -> list[torch.Tensor] | None:
    """Within a step: the plain, summed gradients of this rank, without those that another rank counts.

    None where an optimizer works on the global parameters themselves.
    """
    swap: Swap | None = optimizer.__dict__.get("_workbench_swap")
    if swap is None or (swap.parameters and swap.held is None):
        return None
    here = world.joined()
    counted = swap.plain if here is None or here.rank == 0 else []
    found = [parameter.grad for parameter in counted]
    for owner, part in swap.pairs:
        if not owner._spec.is_placeholder and is_first_holder(state_spec(owner)):
            grad = part.grad
            found.append(plain(grad) if isinstance(grad, GlobalTensor) else grad)
    return [grad for grad in found if grad is not None]


def _part(parameter: GlobalTensor) -> torch.Tensor:
    """The contiguous plain tensor of a parameter that this rank's optimizer changes."""
    if parameter._spec.is_placeholder:
        return parameter
    part, address = parameter._optimizer_part, parameter.data_ptr()
    if part is not None and part[1] == address and part[2] is parameter._spec:
        return part[0]
    local, shard = plain(parameter), shard_of(parameter)
    if shard is not None:
        local = slice_region(local, shard.region)
    if not local.is_contiguous():
        parameter._optimizer_part = None
        return local.contiguous()  # code after the step copies it back
    parameter._optimizer_part = local, address, parameter._spec
    return local


def _wrapped(parameter: GlobalTensor, local: torch.Tensor, grad: torch.Tensor | None) -> GlobalTensor:
    """A global leaf over this rank's part of a parameter, with the reduced gradient in its own layout."""
    spec = state_spec(parameter)
    if spec.is_placeholder:
        local = new_placeholder(spec.shape, parameter.dtype, spec.world.device)
        has_grad = parameter.grad is not None
        grad = new_placeholder(spec.shape, parameter.dtype, spec.world.device) if has_grad else None
    else:
        with local_torch():
            local = local.detach()
    alias = wrap(local, spec)
    set_reduced_grad(alias, grad)
    return alias


def _exchange_places(optimizer: Optimizer, swap: Swap, pairs: list[tuple[Any, torch.Tensor]]) -> None:
    """Put the parts, with their state, in place of the parameters."""
    swap.take_places(pairs)
    owned: Any = optimizer.state
    state: Any = defaultdict(dict, state_beside(owned))
    for owner, part in pairs:
        if (values := dict.get(owned, owner)) is not None:
            state[part] = values
    for parameter in swap.plain:
        if parameter in owned:
            state[parameter] = dict.get(owned, parameter)
    _stepping[id(optimizer)] = optimizer
    swap.held = [group["params"] for group in optimizer.param_groups]
    _put_parts_in_groups(optimizer, swap)
    optimizer.state = state
    if swap.elementwise:
        swap.fused = fuse(optimizer)
    if block_size_of(optimizer):
        with local_torch():
            make_block_state(optimizer, pairs)


def _put_parts_in_groups(optimizer: Optimizer, swap: Swap) -> None:
    for group, members in zip(optimizer.param_groups, swap.members, strict=True):
        group["params"] = [swap.pairs[member][1] if type(member) is int else member for member in members]


def _after_step(self: Optimizer) -> None:
    """In the place of an empty method of torch's, which it calls between a step and the hooks behind it.

    torch's profiler looks for that method, and in it for ``self``.
    """
    if is_nested(self):
        return
    remove_from_hooks(self)
    swap: Swap | None = self.__dict__.get("_workbench_swap")
    if swap is not None and swap.on_host is not None and swap.held is not None:
        _put_parts_in_groups(self, swap)  # its update leaves none
    context = _context()
    if context.recorder is not None:
        context.recorder.optimizer_ends()
    put_back(self, has_stepped=True)
    context.end_step(self)


def _context() -> ExecutionContext:
    here = world.joined()  # a thread outside all worlds may use the optimizer
    return here.context if here is not None else ExecutionContext()


def put_back(optimizer: Optimizer, sends: bool = True, has_stepped: bool = False) -> None:
    """Return the parameters to an optimizer, where a step has replaced them; ``has_stepped``: it has not raised."""
    swap: Swap | None = optimizer.__dict__.get("_workbench_swap")
    _stepping.pop(id(optimizer), None)
    if swap is None or swap.held is None:
        return
    state, owned = optimizer.state, swap.state
    for owner, part in swap.pairs:
        if (found := state.pop(part, None)) is not None:
            owned[owner] = found
    owned.update(state)  # states of plain parameters remain
    optimizer.state = owned
    for group, params in zip(optimizer.param_groups, swap.held, strict=True):
        group["params"] = params
    swap.held = None
    unfuse(swap.fused)
    _write_back(swap, sends, has_stepped)
    for _, part in swap.pairs:
        part.grad = None
    swap.pairs = []


def _write_back(swap: Swap, sends: bool, has_stepped: bool) -> None:
    """Write stepped copies to their places, and if ``sends``, shards to the other ranks that hold the parameter.

    Copies of a step that raised are dropped: the parameter may have got other values since, from a checkpoint.
    """
    if swap.is_summed:
        forget_sums(swap.present)
    stepped, unchanged = [], swap.end_places()
    with torch.no_grad(), local_torch():
        for number, (owner, part) in enumerate(swap.pairs):
            shard = shard_of(owner)
            if owner._spec.is_placeholder or (swap.is_torchs and part.grad is None):
                continue
            if shard is not None:
                stepped.append(owner)
            if not has_stepped:
                owner._optimizer_part = None  # the step may have given the part other memory
                continue
            if shard is None and swap.is_torchs and owner._optimizer_part is not None:
                continue  # the part lies in its place
            place = plain(owner) if shard is None else slice_region(plain(owner), shard.region)
            if place.numel() and place.data_ptr() != part.data_ptr() and number not in unchanged:
                place.copy_(plain(part))
                owner._optimizer_part = None  # the step has given the part other memory
        if sends and swap.is_sharded:
            write_back(stepped)


def _adopt_state(optimizer: Optimizer, swap: Swap) -> None:
    """State that was made before the first step, or loaded, as this rank's parts: it may be global, or of the whole."""
    for parameter in swap.parameters if swap.elementwise else ():
        state = optimizer.state.get(parameter)
        if state:
            state.update((name, part_of(parameter, value)) for name, value in state.items())
    if swap.on_host is not None:
        optimizer.state = swap.on_host.waiting(optimizer.state)
    swap.state = optimizer.state


def adopt_loaded_state(optimizer: Optimizer) -> None:
    """The same for an optimizer that is stepped without its hooks, as in a replay of ``wb.capture``."""
    swap: Swap | None = optimizer.__dict__.get("_workbench_swap")
    if swap is not None and optimizer.state is not swap.state:
        _adopt_state(optimizer, swap)


world.at_rebuild(restore_parameters)
hook(
    "torch.optim.optimizer.register_optimizer_step_pre_hook",
    "a step works on local parts and sums of gradients, which take the place of global parameters",
    lambda: register_optimizer_step_pre_hook(_before_hooks),
)
patch(
    "torch.optim.Optimizer._optimizer_step_code",
    "global parameters come back when the step has been made, before hooks of the user's read them",
    lambda torchs_own: _after_step,
)
patch(
    "torch.optim.Optimizer.zero_grad",
    "a step that raised has left local parts in the place of parameters",
    lambda torchs_own: _zero_grad,
)
