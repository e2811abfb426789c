"""``torch.nn.init`` on global tensors, for its functions that dispatch. The bodies of the others run unchanged."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.nn import init

from workbench.tensors.dispatch.registry import EXACT


def _initializer(function: Any) -> Any:
    """Register a composite for one of torch's initializers, which share names with tensor methods."""

    def register(written: Any) -> Any:
        EXACT[function] = written
        return written

    return register


@_initializer(init.uniform_)
@torch.no_grad()
def init_uniform(tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Any:
    """``nn.init.uniform_``; the key comes from the world's generator."""
    return tensor.uniform_(a, b, generator=generator)


@_initializer(init.normal_)
@torch.no_grad()
def init_normal(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    """``nn.init.normal_``."""
    return tensor.normal_(mean, std, generator=generator)


@_initializer(init.constant_)
@torch.no_grad()
def init_constant(tensor: Any, val: float) -> Any:
    """``nn.init.constant_``."""
    return tensor.fill_(val)


@_initializer(init.kaiming_uniform_)
@torch.no_grad()
def init_kaiming_uniform(
    tensor: Any, a: float = 0, mode: Any = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> Any:
    """``nn.init.kaiming_uniform_``: He et al., arXiv 1502.01852."""
    if 0 in tensor.shape:
        warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=2)
        return tensor
    fan = init._calculate_correct_fan(tensor, mode)
    bound = math.sqrt(3.0) * init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    return tensor.uniform_(-bound, bound, generator=generator)
