"""Mixed precision: ``bf16``, ``fp16`` and ``fp8`` of a strategy, and a gradient scaler whose decision is all ranks'.

The module's forward runs under ``torch.autocast``; parameters, gradients and the optimizer stay in their own dtype, and
so does a loss that is computed outside the module. (Micikevicius et al., Mixed Precision Training, 2018.) Calls of its
parts, or of its other methods, do not: the first one is a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.amp import grad_scaler

from workbench.core.float8_layers import fits_float8
from workbench.errors import StrategyError
from workbench.kernels.float8 import lacks_float8
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.patch_table import patch
from workbench.tensors.rules.matmul.float8 import linear_in_8_bits
from workbench.tensors.torch_patches.joined_rows import is_conv1d
from workbench.tensors.world import World
from workbench.training.gradients.reduction import change_gradients, start_reduction
from workbench.training.gradients.stale_optimizer import check_not_replaced
from workbench.training.strategies.state import ParallelState, layers_of
from workbench.transport.user_code import user_stacklevel

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What a module's forward computes in, by the strategy's word for it; 32 bits have none."""
_torch_unscale: Callable[..., Any] = grad_scaler.GradScaler._unscale_grads_


def check(module: nn.Module, state: ParallelState) -> None:
    """Refuse a precision in which the device of a rank does not compute.

    Raises:
        StrategyError: on all ranks, ``fp8`` if one of them has a device that does not multiply 8 bits.
    """
    world = state.layouts.world
    if state.strategy.options.precision == "fp8":
        lacking = all_gather_object(lacks_float8(world.device), world, "fp8")
        others = (f"on rank {rank}, {why}" for rank, why in enumerate(lacking) if why)
        _refuse_lacking(lacking[world.rank] or next(others, ""))


def install(module: nn.Module, state: ParallelState) -> list[Any]:
    """Let ``module`` compute in the precision of the strategy."""
    world, precision = state.layouts.world, state.strategy.options.precision
    handles, entered = compute_in(module, precision, world.device, world.autocast_type)
    state.on_interrupt.append(partial(_end_all, entered))
    return handles + (_warnings_outside(module, precision, world.autocast_type, entered) if handles else [])


def _refuse_lacking(lacking: str) -> None:
    if lacking:
        raise StrategyError(f"option fp8: {lacking}. Use bf16.")


def compute_in(
    module: nn.Module, precision: str, device: torch.device, autocast_type: str
) -> tuple[list[Any], list[Any]]:
    """Let a module's forward compute in a strategy's precision; returns the hooks, and the contexts of its calls.

    In ``fp8`` the products of linear layers have operands of 8 bits, and all else is as in ``bf16``.

    Raises:
        StrategyError: ``fp8`` on a device that does not multiply 8 bits. The module is unchanged.
    """
    dtype = AUTOCAST_DTYPES.get(precision)
    if dtype is None:
        return [], []
    if precision == "fp8":
        _refuse_lacking(lacks_float8(device))
    entered: list[Any] = []  # calls may be nested

    def begin(*_: Any) -> None:
        entered.append(torch.autocast(autocast_type, dtype=dtype))
        entered[-1].__enter__()

    def end(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    handles: list[Any] = [
        module.register_forward_pre_hook(begin, prepend=True),
        module.register_forward_hook(end, always_call=True),
    ]
    if precision == "fp8":
        handles += [LinearIn8Bits(layer) for layer in module.modules() if _multiplies_in_8_bits(layer)]
    return handles, entered


def _multiplies_in_8_bits(layer: Any) -> bool:
    """Whether it is a linear layer that is called: torch's attention calls none, and takes its projection's weight."""
    is_linear = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    is_linear = is_linear and not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    if not is_linear and not is_conv1d(type(layer)):
        return False
    return "forward" not in layer.__dict__ and fits_float8(tuple(layer.weight.shape))


class LinearIn8Bits:
    """The forward of a linear layer in 8 bits, in the place of the module's own until ``remove``."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._inputs_first = layer, is_conv1d(type(layer))
        layer.forward = self

    def __call__(self, input: torch.Tensor) -> Any:
        """The layer's result."""
        weight = self._layer.weight
        return linear_in_8_bits(input, weight.t() if self._inputs_first else weight, self._layer.bias)

    def remove(self) -> None:
        """Give the layer its own forward back."""
        if self._layer.__dict__.get("forward") is self:
            del self._layer.__dict__["forward"]


def _end_all(entered: list[Any]) -> None:
    """End calls that were broken off."""
    while entered:
        entered.pop().__exit__(None, None, None)


def _warnings_outside(module: nn.Module, precision: str, kind: str, entered: list[Any]) -> list[Any]:
    """Hooks that warn once if a layer runs outside of the module's own call, in which alone its precision acts."""
    has_warned, model = False, type(module).__name__

    def look(name: str, *_: Any) -> None:
        nonlocal has_warned
        # In backward blocks run again, in the context of their first run
        if entered or has_warned or torch._C._current_graph_task_id() != -1 or torch.is_autocast_enabled(kind):
            return
        has_warned = True
        warnings.warn(
            f"{precision}: {name} of {model} runs in 32 bits. The precision of a strategy acts in the call of the "
            f"model itself, and this is another method of it, or a call of a part. Put it into "
            f'"with torch.autocast({kind!r}, dtype={AUTOCAST_DTYPES[precision]}):".',
            stacklevel=user_stacklevel(),
        )

    layers = [(name, layer) for name, layer in layers_of(module) if layer is not module]
    return [layer.register_forward_pre_hook(partial(look, name)) for name, layer in layers]


def unscale_gradients(
    scaler: Any, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> Any:
    """``GradScaler._unscale_grads_``: for global parameters on the sums of gradients, and on their terms alike.

    Raises:
        LayoutError: some of the optimizer's parameters are those of a module before ``wb.parallelize``.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    check_not_replaced(f"GradScaler of {type(optimizer).__name__}", parameters)
    shared = [p for p in parameters if isinstance(p, GlobalTensor)]
    if not shared:
        return _torch_unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    world: World = shared[0]._spec.world
    present = [p for p in shared if not p._spec.is_placeholder]
    if not allow_fp16:
        _refuse_half(present)
    plain = SimpleNamespace(param_groups=[{"params": [p for p in parameters if not isinstance(p, GlobalTensor)]}])
    of_plain = [
        each.to(world.device) for each in _torch_unscale(scaler, plain, inv_scale, found_inf, allow_fp16).values()
    ]
    start_reduction(present)()
    found = found_inf.to(world.device)
    inverse = inv_scale.to(world.device)

    def check_and_unscale(sums: list[torch.Tensor]) -> None:
        for dtype in {tensor.dtype for tensor in sums}:
            torch._amp_foreach_non_finite_check_and_unscale_([t for t in sums if t.dtype == dtype], found, inverse)

    change_gradients(present, lambda terms: torch._foreach_mul_(terms, inverse) if terms else None, check_and_unscale)
    has_gradient = bool(of_plain) or any(p.grad is not None for p in present)
    found = torch.stack([found, *of_plain]).amax() if of_plain else found
    own = torch.stack([found, torch.full_like(found, has_gradient)])
    ranks = tuple(range(world.world_size))
    tag, header = world.context.next_sum_tag(ranks), "overflow of gradients"
    overflow, checked = world.transport.all_reduce(own, ranks, "max", tag, header)
    return {world.device: overflow} if has_gradient or checked else {}  # none, of which torch's step tells


def _refuse_half(parameters: list[GlobalTensor]) -> None:
    with local_torch():
        half = [p for p in parameters if p.grad is not None and p.grad.dtype == torch.float16]
    if half:
        raise ValueError("Attempting to unscale FP16 gradients.")


patch(
    "torch.amp.grad_scaler.GradScaler._unscale_grads_",
    "whether a step is skipped is a decision of all ranks",
    lambda torchs_own: unscale_gradients,
)
