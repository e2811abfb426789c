"""Norms for the sweep over layouts: split normalized dims, split channels, running statistics."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.tensors.dispatch.cases import _case
from workbench.tensors.global_tensor import GlobalTensor


def _running(x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Running statistics of the kind of x: plain, or the same on every rank."""
    mean, var = torch.linspace(-1, 1, x.shape[1]), torch.linspace(1, 2, x.shape[1]) * scale
    if isinstance(x, GlobalTensor):
        layout = ["B"] * len(x.sbp)
        return tuple((x.detach().sum() * 0 + part).to_global(sbp=layout) for part in (mean, var))
    return mean, var


def _batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mean, var = _running(x)
    y = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.3)
    z = F.batch_norm(x, mean, var, None, bias, training=True, momentum=0.5)
    return torch.cat([(y + z).flatten(), mean, var])


def _batch_norm_eval(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, *_running(x), weight, bias, training=False)


def _instance_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mean, var = _running(x)
    y = F.instance_norm(x, mean, var, weight, bias, momentum=0.2)
    return torch.cat([y.flatten(), mean, var, F.instance_norm(x, mean, var, use_input_stats=False).flatten()])


def _weight_norm(v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch._weight_norm(v, g, 0) + torch._weight_norm(v, g[:1, :1].expand(1, 4) * 2, 1)


CASES = [
    _case("layer_norm two dims", lambda x, w, b: F.layer_norm(x, (3, 4), w, b), (5, 3, 4), (3, 4), (3, 4)),
    _case("layer_norm plain", lambda x: F.layer_norm(20 + x, (7,)), (3, 7)),
    _case("layer_norm weight", lambda x, w: F.layer_norm(x, (7,), w), (3, 7), (7,)),
    _case("rms_norm split", lambda x, w: F.rms_norm(x, (3, 4), w, 1e-3), (5, 3, 4), (3, 4)),
    _case("rms_norm plain", lambda x: F.rms_norm(x, (7,)), (3, 7)),
    _case("group_norm channels", lambda x, w, b: F.group_norm(x, 6, w, b), (4, 12, 3), (12,), (12,)),
    _case("group_norm plain", lambda x: F.group_norm(x, 2, eps=1e-3), (2, 4, 2, 2)),
    _case("instance_norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), (5, 4, 3, 2), (4,), (4,)),
    _case("instance_norm running", _instance_norm, (5, 4, 3), (4,), (4,)),
    _case("batch_norm running", _batch_norm, (7, 4), (4,), (4,)),
    _case("batch_norm pixels", lambda x, b: F.batch_norm(x, None, None, None, b, True), (2, 5, 3, 2), (5,)),
    _case("batch_norm eval", _batch_norm_eval, (5, 4, 3), (4,), (4,)),
    _case("batch_norm few", lambda x: F.batch_norm(x, None, None, training=True), (2, 3, 1)),
    _case("local_response_norm", lambda x: F.local_response_norm(x, 3), (3, 5, 4)),
    _case("weight_norm", _weight_norm, (5, 4), (5, 1)),
]
