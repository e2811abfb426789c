"""Random functions on global tensors: dropout, in-place filling, ``*_like``. Numbers follow the logical position."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import init

from workbench.core.layout import Shape
from workbench.core.sbp import Partial, broadcast
from workbench.runtime import random
from workbench.runtime.boxing import box
from workbench.runtime.ops.local import local_call, whole
from workbench.runtime.ops.registry import EXACT, composite, handler
from workbench.runtime.tensor import GlobalTensor, ghost_storage, label, local_torch, spec_of


def _without_partial(tensor: GlobalTensor) -> Any:
    layout = tensor._spec.layout
    return layout.with_sbp(tuple(broadcast if isinstance(entry, Partial) else entry for entry in layout.sbp))


def _sample_like(tensor: GlobalTensor, sampler: random.Sampler, dtype: torch.dtype) -> GlobalTensor:
    """A random tensor with the shape and, partial sums apart, the layout of ``tensor``."""
    spec = spec_of(tensor._spec.world, _without_partial(tensor), tensor._spec.shape)
    key = random.draw_key(spec.world)
    if spec.is_ghost:
        return label(ghost_storage(spec.shape, dtype, spec.world.device), spec)
    return label(random.sample_shard(sampler, key, spec.layout, spec.shape, dtype, spec.world), spec)


def sample_of_shape(like: GlobalTensor, shape: Shape, sampler: random.Sampler, dtype: torch.dtype) -> GlobalTensor:
    """A random tensor of any shape, whole on every rank of the placement of ``like``."""
    spec = spec_of(like._spec.world, like._spec.layout.broadcast(), shape)
    key = random.draw_key(spec.world)
    if spec.is_ghost:
        return label(ghost_storage(shape, dtype, spec.world.device), spec)
    return label(random.sample_shard(sampler, key, spec.layout, shape, dtype, spec.world), spec)


@composite("dropout")
def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout whose mask depends on the logical position only."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input
    complete = whole(input)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    mask = _sample_like(complete, random.bernoulli_sampler(1.0 - p), input.dtype)
    layout = complete._spec.layout
    out = (layout, complete._spec.shape, input.dtype)
    result = local_call(lambda x, keep: x * keep * scale, [complete, mask], [layout, layout], out, "dropout")
    return input.copy_(result) if inplace else result


@composite("rand_like")
def rand_like(input: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Uniform numbers in the layout of ``input``."""
    return _sample_like(input, random.uniform_sampler(), dtype or input.dtype)


@composite("randn_like")
def randn_like(input: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Normal numbers in the layout of ``input``."""
    return _sample_like(input, random.normal_sampler(), dtype or input.dtype)


def _fill(tensor: GlobalTensor, sampler: random.Sampler) -> GlobalTensor:
    values = box(_sample_like(tensor, sampler, tensor.dtype), tensor._spec.layout)
    if not tensor._spec.is_ghost:
        with local_torch():
            tensor.copy_(values)
    return tensor


@handler("normal")
def normal_(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.normal_(mean, std)``."""
    tensor, mean, std = (*args, *[None] * (3 - len(args)))[:3]
    return _fill(
        tensor, random.normal_sampler(kwargs.get("mean", mean) or 0.0, kwargs.get("std", 1.0 if std is None else std))
    )


@handler("uniform")
def uniform_(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.uniform_(from, to)``."""
    low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
    high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
    return _fill(args[0], random.uniform_sampler(low, high))


@handler("bernoulli")
def bernoulli(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.bernoulli_(p)`` in place; ``torch.bernoulli(probabilities)`` makes a new tensor."""
    tensor = args[0]
    if func.__name__ == "bernoulli_":
        return _fill(tensor, random.bernoulli_sampler(args[1] if len(args) > 1 else kwargs.get("p", 0.5)))
    tensor = whole(tensor)
    return (_sample_like(tensor, random.uniform_sampler(), tensor.dtype) < tensor).to(tensor.dtype)


def _constant_like(make: Any) -> Any:
    def creation(func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        spec = spec_of(tensor._spec.world, _without_partial(tensor), tensor._spec.shape)
        dtype = kwargs.get("dtype") or tensor.dtype
        if spec.is_ghost:
            local = ghost_storage(spec.shape, dtype, spec.world.device)
        else:
            local = make(spec.local_shape, *args[1:], dtype=dtype, device=spec.world.device)
        result = label(local, spec)
        return result.requires_grad_() if kwargs.get("requires_grad") else result

    return creation


for _name, _make in (("zeros", torch.zeros), ("ones", torch.ones), ("empty", torch.empty), ("full", torch.full)):
    handler(f"{_name}_like")(_constant_like(_make))


def _new(make: Any) -> Any:
    def creation(func: Any, args: Any, kwargs: Any) -> Any:
        """``Tensor.new_zeros`` and its like: broadcast on the tensor's placement, as nothing else is known of it."""
        tensor = args[0]
        sizes = args[1:] if args[1:] and isinstance(args[1], int) else (tuple(args[1]), *args[2:])
        shape = tuple(sizes) if isinstance(sizes[0], int) else tuple(sizes[0])
        rest = () if isinstance(sizes[0], int) else sizes[1:]
        spec = spec_of(tensor._spec.world, tensor._spec.layout.broadcast(), shape)
        dtype = kwargs.get("dtype") or tensor.dtype
        if spec.is_ghost:
            return label(ghost_storage(shape, dtype, spec.world.device), spec)
        return label(make(shape, *rest, dtype=dtype, device=spec.world.device), spec)

    return creation


for _name, _make in (
    ("new_zeros", torch.zeros),
    ("new_ones", torch.ones),
    ("new_empty", torch.empty),
    ("new_full", torch.full),
):
    handler(_name)(_new(_make))


def _initializer(function: Any) -> Any:
    """Register a composite for one of torch's initializers; they share names with tensor methods."""

    def register(written: Any) -> Any:
        EXACT[function] = written
        return written

    return register


@_initializer(init.uniform_)
@torch.no_grad()
def init_uniform(tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Any:
    """``nn.init.uniform_``; the key comes from the world's generator."""
    return tensor.uniform_(a, b)


@_initializer(init.normal_)
@torch.no_grad()
def init_normal(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    """``nn.init.normal_``."""
    return tensor.normal_(mean, std)


@_initializer(init.constant_)
@torch.no_grad()
def init_constant(tensor: Any, val: float) -> Any:
    """``nn.init.constant_``."""
    return tensor.fill_(val)


@_initializer(init.kaiming_uniform_)
@torch.no_grad()
def init_kaiming_uniform(
    tensor: Any, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> Any:
    """``nn.init.kaiming_uniform_``: He et al., arXiv 1502.01852."""
    fan_in, fan_out = init._calculate_fan_in_and_fan_out(tensor)
    fan = fan_in if mode == "fan_in" else fan_out
    bound = math.sqrt(3.0) * init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    return tensor.uniform_(-bound, bound)
