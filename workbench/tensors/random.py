"""Random tensors by logical position: the same numbers for every layout, every number of ranks, and one device.

A call draws one key, equal on all ranks, and every rank makes the slices it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from workbench.core.layout import Layout, Region, Shape
from workbench.kernels import philox
from workbench.kernels.random_slice import fill_random, position_blocks
from workbench.tensors.copy_to_device import copy_to_device
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.world import World, current

Sampler: TypeAlias = tuple[str, float, float] | Callable[[int, np.ndarray], np.ndarray]
"""A distribution: kind and two parameters of ``kernels.random_slice.fill_random``, or for what it does not know a
function (key, positions) -> values of the positions' shape.
"""


def manual_seed(seed: int) -> None:
    """Seed the random numbers of global tensors, and torch's default generator. Call it with the same seed on all
    ranks.

    >>> wb.manual_seed(0)
    """
    world = current()
    if world.context.generator is not None:
        world.context.generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def draw_key(world: World, generator: torch.Generator | None = None, is_used: bool = True) -> int:
    """A 63-bit key from the generator that all ranks advance alike, or from the one that the caller gave.

    It is drawn on the CPU, also where torch makes tensors on another device: every GPU has a generator of its own.

    ``is_used`` is false on a rank that draws because others do, and makes no numbers of the key.
    """
    if world.context.recorder is not None:
        # A pipeline's step has its own generator.
        source = generator if world.context.running is None else generator or world.context.generator
        drawn: int = world.context.recorder.draw(_draw, world, source, is_used=is_used)
        return drawn
    return _draw(world, generator)


def _draw(world: World, generator: torch.Generator | None) -> int:
    source = generator or world.context.generator
    device = torch.device("cpu") if source is None else source.device
    with hidden_from_modes():
        return int(torch.randint(0, 2**63 - 1, (1,), generator=source, device=device).item())


def sample_shard(
    sampler: Sampler, key: int, layout: Layout, shape: Shape, dtype: torch.dtype, world: World
) -> torch.Tensor:
    """This rank's shard of a random tensor; ``layout`` has splits and broadcasts only."""
    region = layout.region(shape, world.rank)
    if isinstance(sampler, tuple):
        kind, low, high = sampler
        first, strides = place_of(shape, region)
        numbers = out = torch.empty([stop - start for start, stop in region], dtype=dtype, device=world.device)
        if dtype.is_complex:  # pairs of real numbers, which share the variance
            numbers, first, strides = torch.view_as_real(out), 2 * first, [*(2 * stride for stride in strides), 1]
            high = high / math.sqrt(2) if kind == "normal" else high
        fill_random(numbers, kind, key, first, strides, low, high)
        return out
    if world.context.recorder is not None:
        drawn: torch.Tensor = world.context.recorder.call("draw", _blockwise, sampler, key, shape, region, dtype)
        return copy_to_device(drawn, world.device)
    with hidden_from_modes():
        return copy_to_device(_blockwise(sampler, key, shape, region, dtype), world.device)


def _blockwise(
    draw: Callable[[int, np.ndarray], np.ndarray], key: int, shape: Shape, region: Region, dtype: torch.dtype
) -> torch.Tensor:
    sizes = [stop - start for start, stop in region]
    places = position_blocks(sizes, *place_of(shape, region))
    blocks = [torch.from_numpy(draw(key, positions)).to(dtype) for positions in places]
    return (torch.cat(blocks) if blocks else torch.empty(0, dtype=dtype)).view(sizes)


def place_of(shape: Shape, region: Region) -> tuple[int, list[int]]:
    """Position in the logical tensor of a region's first element, and the strides of the logical tensor."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return sum(start * stride for (start, _), stride in zip(region, strides, strict=True)), strides


def _inside(key: int, at: np.ndarray) -> np.ndarray:
    """Uniform float64 in (0, 1), for logarithms."""
    return philox.uniform64(key, at) + 2.0**-54


def uniform_sampler(low: float = 0.0, high: float = 1.0) -> Sampler:
    """Uniform in [low, high)."""
    return "uniform", low, high


def normal_sampler(mean: float = 0.0, std: float = 1.0) -> Sampler:
    """Normal with this mean and standard deviation, which of a complex number is that of both parts together."""
    return "normal", mean, std


def truncated_normal_sampler(mean: float = 0.0, std: float = 1.0) -> Sampler:
    """Normal with this mean and standard deviation, cut at two standard deviations."""
    mass = math.erf(math.sqrt(2.0))

    def draw(key: int, at: np.ndarray) -> np.ndarray:
        quantile = torch.from_numpy((2.0 * _inside(key, at) - 1.0) * mass)
        return mean + std * math.sqrt(2.0) * torch.erfinv(quantile).numpy()

    return draw


def log_normal_sampler(mean: float = 1.0, std: float = 2.0) -> Sampler:
    """The exponential of a normal number."""
    return lambda key, at: np.exp(mean + std * philox.normal(key, at))


def exponential_sampler(rate: float = 1.0) -> Sampler:
    """Exponential with mean ``1 / rate``; never zero."""
    return lambda key, at: -np.log(_inside(key, at)) / rate


def geometric_sampler(probability: float) -> Sampler:
    """Number of trials up to the first success, at least one."""
    if probability == 1.0:
        return lambda key, at: np.ones(at.shape)
    return lambda key, at: np.maximum(np.ceil(np.log(_inside(key, at)) / np.log1p(-probability)), 1.0)


def cauchy_sampler(median: float = 0.0, sigma: float = 1.0) -> Sampler:
    """Cauchy with this median and scale."""
    return lambda key, at: median + sigma * np.tan(np.pi * (_inside(key, at) - 0.5))


def integer_sampler(low: int, high: int) -> Sampler:
    """Integers in [low, high).

    Raises:
        ValueError: there are none.
    """
    if low >= high:
        raise ValueError(f"randint(low={low}, high={high}): no integer lies in [{low}, {high}). Give a larger high.")
    if low >= -(2**53) and high <= 2**53:  # the parameters of fill_random are doubles
        return "integers", low, high
    return lambda key, at: philox.integers(key, at, low, high)


def bernoulli_sampler(probability: float) -> Sampler:
    """One with this probability, else zero."""
    return "bernoulli", probability, 0.0


def permutation(count: int, dtype: torch.dtype, world: World, generator: torch.Generator | None = None) -> torch.Tensor:
    """The numbers below ``count`` in random order. All ranks of the world call it.

    Raises:
        RuntimeError: the dtype does not hold all of them.
    """
    if count - 1 > largest_integer(dtype):
        raise RuntimeError(
            f"randperm({count}, dtype={dtype}): it has numbers up to {count - 1}, and {dtype} holds those up to "
            f"{largest_integer(dtype)}. Give a wider dtype, such as torch.int64."
        )
    drawn = philox.integers(draw_key(world, generator), np.arange(count), 0, 2**63)
    return torch.from_numpy(np.argsort(drawn, kind="stable")).to(dtype)


def largest_integer(dtype: torch.dtype) -> int:
    """The largest n such that a dtype holds all integers from 0 to n."""
    if dtype == torch.bool:
        return 1
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


UNUSED = torch.Generator()
"""For draws whose numbers nobody takes."""


def check_filling(name: str, dtype: torch.dtype, *parameters: Any, **named: Any) -> None:
    """Raise torch's own error for an in-place filling, such as ``normal_``, with numbers as parameters."""
    with hidden_from_modes(), local_torch():
        getattr(torch.empty(1, dtype=dtype, device="cpu"), name)(*parameters, **named, generator=UNUSED)
