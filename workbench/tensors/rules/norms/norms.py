"""Norms: layer, rms, group, instance; ``batch_norm`` has its own file. Their moments are those of the logical tensor.

If the averaged dims are whole on every rank, torch's own function runs on the shards. Otherwise the moments come from
``variance``, with one exchange of two rows per rank, and the rest works element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.layout import Layout
from workbench.core.rules import Signature
from workbench.core.sbp import Sbp, Split, broadcast
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.local_call import local_call, sum_terms
from workbench.tensors.dispatch.planning import as_autocast_gives
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, composite, normalize_dims, rule, term
from workbench.tensors.global_tensor import GlobalTensor, Spec
from workbench.tensors.rules.norms.batch_norm import fit_channels, global_input, move_running, of_one_sample
from workbench.tensors.rules.reduction.two_stage import splits, stages_of, terms
from workbench.tensors.rules.reduction.variance import accumulation_dtype, moments


@rule("layer_norm", "rms_norm")
def _layer_norm(call: Call) -> Resolution:
    ndim, num_normalized = len(call.shapes[0]), len(call.args[1])
    rest = term(ndim, range(ndim - num_normalized, ndim))
    weight = rest[ndim - num_normalized :]
    return Resolution(f"{rest}{f', {weight}' * (len(call.operands) - 1)} -> {rest}")


def _normalized_dims(input: Any, normalized_shape: Sequence[int], *weights: Any) -> list[int] | None:
    """The normalized dims, if one of them is split in the input or a weight; else None."""
    if type(input) is not GlobalTensor:
        return None
    ndim = len(input._spec.shape)
    dims = list(range(ndim - len(normalized_shape), ndim))
    shape = tuple(normalized_shape)
    if not shape or input._spec.shape[dims[0] :] != shape or 0 in input._spec.shape:
        return None
    if any(weight is not None and weight.shape != shape for weight in weights):
        return None  # torch refuses it
    # Only a tensor that is no parameter may be gathered.
    follows = any(splits(weight) and weight._is_param for weight in weights)
    return dims if follows or splits(input, dims) else None


def _apply(
    x: GlobalTensor, small: Sequence[GlobalTensor], weight: Any, bias: Any, function: Any, name: str
) -> GlobalTensor:
    """``function(x, *small) * weight + bias`` on the shards of x, in at least 32 bits.

    ``small`` tensors have the dims of x, and their dims of size one are whole. Weight and bias are aligned to the
    right, and may be None.
    """
    layout, dtype, num_small = x._spec.layout, x.dtype, len(small)
    operands = [*small, *(_as_global(each, x) for each in (weight, bias) if each is not None)]
    has_weight, has_bias = weight is not None, bias is not None

    def local(t: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        result = function(t.to(accumulation_dtype(dtype)), *rest[:num_small])
        result = result * rest[num_small] if has_weight else result
        return (result + rest[-1] if has_bias else result).to(dtype)

    layouts = [layout, *(_aligned(layout, x, operand) for operand in operands)]
    return local_call(local, [x, *operands], layouts, (layout, x._spec.shape, dtype), name)


def _aligned(layout: Layout, x: GlobalTensor, operand: GlobalTensor) -> Layout:
    """The layout in which ``operand``, aligned to the right as in broadcasting, fits the shards of x."""
    shape = operand._spec.shape
    offset = len(x._spec.shape) - len(shape)
    entries: list[Sbp] = []
    for entry in layout.sbp:
        meets = isinstance(entry, Split) and entry.dim >= offset and shape[entry.dim - offset] != 1
        entries.append(Split(entry.dim - offset) if isinstance(entry, Split) and meets else broadcast)
    return layout.with_sbp(tuple(entries))


def _as_global(tensor: Any, like: GlobalTensor) -> GlobalTensor:
    if type(tensor) is GlobalTensor:
        return tensor
    return from_local(tensor, like._spec.world, like._spec.layout)


@composite("layer_norm")
def layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """Layer norm over split dims, from the moments of each logical row."""
    dims = _normalized_dims(input, normalized_shape, weight, bias)
    if dims is None:
        return NotImplemented
    x = sum_terms(as_autocast_gives(input, F.layer_norm, input, normalized_shape, weight, bias))
    mean, variance = moments(x, dims)
    return _apply(x, [mean, variance], weight, bias, lambda t, m, v: (t - m) * torch.rsqrt(v + eps), "layer_norm")


@composite("rms_norm")
def rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """Root mean square norm over split dims: one sum of a number per row."""
    dims = _normalized_dims(input, normalized_shape, weight)
    if dims is None:
        return NotImplemented
    x = sum_terms(as_autocast_gives(input, F.rms_norm, input, normalized_shape, weight))
    count = math.prod(normalized_shape)
    wide = accumulation_dtype(x.dtype)
    tiny = torch.finfo(wide).eps if eps is None else eps
    stages = stages_of(x, dims)

    def mean_square(t: torch.Tensor) -> torch.Tensor:
        return t.to(wide).square().sum(dims, keepdim=True) / count

    square = sum_terms(terms(mean_square, [x], [stages.layout], stages, True, wide, "rms_norm"), "rms_norm")
    return _apply(x, [square], weight, None, lambda t, s: t * torch.rsqrt(s + tiny), "rms_norm")


@rule("group_norm")
def _group_norm(call: Call) -> Resolution:
    """The batch may be split, and the channels if each rank gets whole groups."""
    shape, num_groups = call.shapes[0], call.args[1]
    placement = call.operands[0]._spec.layout.placement
    num_weights = len(call.operands) - 1
    found = [Signature((Split(0), *[broadcast] * num_weights), (Split(0),), "n")]
    if num_groups % placement.num_ranks == 0:
        found.append(Signature((Split(1), *[Split(0)] * num_weights), (Split(1),), "c"))
    found.append(Signature((broadcast,) * (1 + num_weights), (broadcast,)))

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
        groups = num_groups * inputs[0].local_shape[1] // max(1, shape[1])
        eps = call.arg(4, "eps", 1e-5)
        # F.group_norm would refuse a small shard. torch has checked the size of the logical batch.
        return lambda x, _, weight=None, bias=None, *__, **___: torch.group_norm(x, groups, weight, bias, eps)

    return Resolution(found, localize)


@rule("instance_norm")
def _instance_norm(call: Call) -> Resolution | None:
    """Without running statistics, the channels of all samples are independent."""
    space = "XYZ"[: len(call.shapes[0]) - 2]
    text = f"nc{space}{', c' * (len(call.operands) - 1)} -> nc{space}"
    return Resolution(text, of_one_sample(F.instance_norm), filled="nc")


@composite("instance_norm")
def instance_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """Instance norm. Running statistics use the mean over the logical batch."""
    x = global_input(input, running_mean, running_var, weight, bias)
    if not use_input_stats:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    if running_mean is None and not splits(x, range(2, x.dim())):
        return NotImplemented
    if not fit_channels(x._spec.shape, running_mean, running_var, weight, bias):
        return NotImplemented
    count = input.numel() // max(1, input.shape[0] * input.shape[1])
    if count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.size()}")
    x, space = sum_terms(x), list(range(2, x.dim()))
    is_whole = not splits(x, space)  # then torch's own function normalizes the shards
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_whole):
        mean, variance = moments(x, space)
    if running_mean is not None:
        with torch.no_grad():
            of_batch = torch.stack([mean.detach(), variance.detach() * (count / (count - 1))]).mean(1)
            of_mean, of_variance = sum_terms(of_batch).reshape(2, -1).unbind(0)
        move_running(running_mean, of_mean, momentum)
        move_running(running_var, of_variance, momentum)
    if is_whole:
        return F.instance_norm(x, None, None, weight, bias, True, momentum, eps)
    weight, bias = (each if each is None else each.reshape(*each.shape, *[1] * len(space)) for each in (weight, bias))
    return _apply(x, [mean, variance], weight, bias, lambda t, m, v: (t - m) * torch.rsqrt(v + eps), "instance_norm")


@rule("_weight_norm")
def _weight_norm_rule(call: Call) -> Resolution:
    """Each slice along ``dim`` has its own norm."""
    ndim = len(call.shapes[0])
    dim = call.arg(2, "dim", 0) % ndim
    text = term(ndim, [d for d in range(ndim) if d != dim])
    return Resolution(f"{text}, {term(ndim, ones=[d for d in range(ndim) if d != dim])} -> {text}", filled=text[dim])


@composite("_weight_norm")
def weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """``v * g / norm(v)`` with the norm over all dims but one; over all dims where ``dim`` is -1."""
    if dim != -1 and not splits(v, [d for d in range(v.dim()) if d not in normalize_dims(dim, v.dim())]):
        return NotImplemented
    return v * (g / torch.norm_except_dim(v, 2, dim))
