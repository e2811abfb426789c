"""Random tensors by logical position: the same numbers for every layout, every number of ranks, and one device.

A call draws one key, equal on all ranks, and every rank makes the slices it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from workbench.core.layout import Layout, Region, Shape
from workbench.kernels import philox
from workbench.runtime.world import World, current

Sampler = Callable[[int, np.ndarray], np.ndarray]
"""(key, positions) -> values of the same shape."""


def manual_seed(seed: int) -> None:
    """Seed this rank's generator of keys (and torch's default one); call it with the same seed on all ranks.

    >>> wb.manual_seed(0)
    """
    world = current()
    if world.generator is not None:
        world.generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def draw_key(world: World) -> int:
    """A 63-bit key from the generator that all ranks advance alike."""
    return int(torch.randint(0, 2**63 - 1, (1,), generator=world.generator).item())


def positions_of(shape: Shape, region: Region) -> np.ndarray:
    """Row-major positions in the logical tensor of a region's elements, in the region's shape."""
    positions = np.zeros([stop - start for start, stop in region], dtype=np.int64)
    for dim, (start, stop) in enumerate(region):
        along = np.arange(start, stop, dtype=np.int64) * math.prod(shape[dim + 1 :])
        positions += along.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return positions


def sample_shard(
    sampler: Sampler, key: int, layout: Layout, shape: Shape, dtype: torch.dtype, world: World
) -> torch.Tensor:
    """This rank's shard of a random tensor; ``layout`` has splits and broadcasts only."""
    positions = positions_of(shape, layout.region(shape, world.rank))
    return torch.from_numpy(np.ascontiguousarray(sampler(key, positions))).to(dtype=dtype, device=world.device)


def uniform_sampler(low: float = 0.0, high: float = 1.0) -> Sampler:
    """Uniform in [low, high)."""
    return lambda key, at: low + (high - low) * philox.uniform(key, at)


def normal_sampler(mean: float = 0.0, std: float = 1.0) -> Sampler:
    """Normal with this mean and standard deviation."""
    return lambda key, at: mean + std * philox.normal(key, at)


def integer_sampler(low: int, high: int) -> Sampler:
    """Integers in [low, high)."""
    return lambda key, at: philox.integers(key, at, low, high)


def bernoulli_sampler(probability: float) -> Sampler:
    """One with this probability, else zero."""
    return lambda key, at: philox.uniform(key, at) < probability
