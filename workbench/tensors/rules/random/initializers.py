"""``torch.nn.init`` on global tensors, for its functions that dispatch. The bodies of the others run unchanged."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.nn import init

from workbench.tensors.dispatch.registry import EXACT

no_grad = torch.no_grad()
EXACT[init.uniform_] = no_grad(lambda tensor, a, b, generator=None: tensor.uniform_(a, b, generator=generator))
EXACT[init.normal_] = no_grad(lambda tensor, mean, std, generator=None: tensor.normal_(mean, std, generator=generator))
EXACT[init.constant_] = no_grad(lambda tensor, val: tensor.fill_(val))


@no_grad
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


EXACT[init.kaiming_uniform_] = init_kaiming_uniform
