"""Random tensors by logical position: the same numbers for every layout, every number of ranks, and one device.

A call draws one key, equal on all ranks, and every rank makes the slices it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workbench.core.layout import Layout, Region, Shape
from workbench.kernels import philox
from workbench.kernels.random_slice import fill_random, position_blocks
from workbench.tensors.copy_to_device import copy_to_device
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.world import World, current


@dataclass(frozen=True, slots=True)
class Sampler:
    """A distribution.

    Attributes:
        draw: (key, positions, dtype to be) -> values of the positions' shape.
        kernel: kind and two parameters of ``kernels.random_slice.fill_random``, which makes the same numbers on a
            GPU; None where no kernel does.
    """

    draw: Callable[[int, np.ndarray, torch.dtype], np.ndarray]
    kernel: tuple[str, float, float] | None = None

    def __call__(self, key: int, positions: np.ndarray, dtype: torch.dtype) -> np.ndarray:
        return self.draw(key, positions, dtype)


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
    sizes = [stop - start for start, stop in region]
    if sampler.kernel is not None and not dtype.is_complex:
        out = torch.empty(sizes, dtype=dtype, device=world.device)
        kind, *parameters = sampler.kernel
        fill_random(out, kind, key, *place_of(shape, region), *parameters)
        return out
    if world.context.recorder is not None:
        drawn: torch.Tensor = world.context.recorder.call("draw", _blockwise, sampler, key, shape, region, dtype)
        return copy_to_device(drawn, world.device)
    with hidden_from_modes():
        return copy_to_device(_blockwise(sampler, key, shape, region, dtype), world.device)


def _blockwise(sampler: Sampler, key: int, shape: Shape, region: Region, dtype: torch.dtype) -> torch.Tensor:
    sizes = [stop - start for start, stop in region]
    blocks = [_sample(sampler, key, positions, dtype) for positions in position_blocks(sizes, *place_of(shape, region))]
    joined = blocks[0] if len(blocks) == 1 else torch.cat(blocks) if blocks else torch.empty(0, dtype=dtype)
    return joined.view(sizes)


def place_of(shape: Shape, region: Region) -> tuple[int, list[int]]:
    """Position in the logical tensor of a region's first element, and the strides of the logical tensor."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return sum(start * stride for (start, _), stride in zip(region, strides, strict=True)), strides


def _sample(sampler: Sampler, key: int, positions: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        parts = [torch.from_numpy(sampler(key, positions * 2 + part, dtype)) for part in (0, 1)]
        return torch.complex(*(part.double() for part in parts)).to(dtype)
    return torch.from_numpy(np.ascontiguousarray(sampler(key, positions, dtype))).to(dtype)


_MANTISSA_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _unit(key: int, at: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Uniform in [0, 1) with as many bits as the dtype holds, so that rounding never gives one."""
    if dtype == torch.float64:
        return philox.uniform64(key, at)
    return philox.uniform(key, at, _MANTISSA_BITS.get(dtype, 24))


def _inside(key: int, at: np.ndarray) -> np.ndarray:
    """Uniform float64 in (0, 1), for logarithms."""
    return philox.uniform64(key, at) + 2.0**-54


def uniform_sampler(low: float = 0.0, high: float = 1.0) -> Sampler:
    """Uniform in [low, high)."""
    return Sampler(lambda key, at, dtype: low + (high - low) * _unit(key, at, dtype), ("uniform", low, high))


def normal_sampler(mean: float = 0.0, std: float = 1.0) -> Sampler:
    """Normal with this mean and standard deviation, which of a complex number is that of both parts together."""
    return Sampler(
        lambda key, at, dtype: mean + (std / math.sqrt(2) if dtype.is_complex else std) * philox.normal(key, at),
        ("normal", mean, std),
    )


def truncated_normal_sampler(mean: float = 0.0, std: float = 1.0) -> Sampler:
    """Normal with this mean and standard deviation, cut at two standard deviations."""
    mass = math.erf(math.sqrt(2.0))

    def draw(key: int, at: np.ndarray, dtype: torch.dtype) -> np.ndarray:
        quantile = torch.from_numpy((2.0 * _inside(key, at) - 1.0) * mass)
        return mean + std * math.sqrt(2.0) * torch.erfinv(quantile).numpy()

    return Sampler(draw)


def log_normal_sampler(mean: float = 1.0, std: float = 2.0) -> Sampler:
    """The exponential of a normal number."""
    return Sampler(lambda key, at, dtype: np.exp(mean + std * philox.normal(key, at)))


def exponential_sampler(rate: float = 1.0) -> Sampler:
    """Exponential with mean ``1 / rate``; never zero."""
    return Sampler(lambda key, at, dtype: -np.log(_inside(key, at)) / rate)


def geometric_sampler(probability: float) -> Sampler:
    """Number of trials up to the first success, at least one."""
    if probability == 1.0:
        return Sampler(lambda key, at, dtype: np.ones(at.shape))
    return Sampler(lambda key, at, dtype: np.maximum(np.ceil(np.log(_inside(key, at)) / np.log1p(-probability)), 1.0))


def cauchy_sampler(median: float = 0.0, sigma: float = 1.0) -> Sampler:
    """Cauchy with this median and scale."""
    return Sampler(lambda key, at, dtype: median + sigma * np.tan(np.pi * (_inside(key, at) - 0.5)))


def integer_sampler(low: int, high: int) -> Sampler:
    """Integers in [low, high).

    Raises:
        ValueError: there are none.
    """
    if low >= high:
        raise ValueError(f"randint(low={low}, high={high}): no integer lies in [{low}, {high}). Give a larger high.")
    fits = -(2**53) <= low < high <= 2**53  # the kernel's parameters are doubles
    return Sampler(
        lambda key, at, dtype: philox.integers(key, at, low, high), ("integers", low, high) if fits else None
    )


def bernoulli_sampler(probability: float) -> Sampler:
    """One with this probability, else zero."""
    return Sampler(lambda key, at, dtype: philox.uniform(key, at) < probability, ("bernoulli", probability, 0.0))


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
