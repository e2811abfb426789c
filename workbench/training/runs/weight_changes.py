"""The changes of a model's tensors in the first steps of a run. A verdict compares them with one device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from workbench.core.verdict import TOLERANCES, WEIGHT_STEPS, TensorChange, Tolerance
from workbench.training.runs.exact_dtypes import wide

State = Mapping[str, torch.Tensor]
"""Tensors of a model's ``state_dict`` by name."""
_PRECISIONS = {
    torch.float64: "float64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
_FROM_COARSE = ("fp8", "bf16", "fp16", "fp32", "float64")


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of ``state_dict`` by name, unchanged. It leaves out buffers that are not kept."""
    not_kept = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    buffers = model.named_buffers(remove_duplicate=False)
    kept = {name: buffer for name, buffer in buffers if name not in not_kept}
    return dict(model.named_parameters(remove_duplicate=False)) | kept


def copied_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies in host memory of the parameters and buffers of ``state_dict``, by name."""
    return {name: value.detach().to("cpu", copy=True) for name, value in state_tensors(model).items()}


def precision_of(model: nn.Module, option: str = "fp32") -> str:
    """The coarsest precision in which a model computes: of its parameters, and of the strategy's ``option``."""
    found = {_PRECISIONS[dtype] for p in model.parameters() if (dtype := p.dtype.to_real()) in _PRECISIONS}
    found |= {option} if option != "fp32" else set()
    return next((name for name in _FROM_COARSE if name in found), "fp32")


def perturb(model: nn.Module, tolerance: Tolerance) -> nn.Module:
    """Change every weight by up to one rounding unit of itself, at random."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            is_trained = parameter.is_floating_point() or parameter.is_complex()
            if is_trained and parameter.device.type != "meta":
                factors = torch.rand(parameter.shape, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
                moved = wide(parameter) * (1 + tolerance.unit * factors.to(parameter.device))
                parameter.copy_(moved)
    return model


@dataclass(frozen=True)
class WeightHistory:
    """A model's tensors before the first step and after the steps that weights are compared after.

    Attributes:
        end: empty if the run stopped before that step.
        parameters: the names of the parameters among them.
        precision: the coarsest one in which the model computes.
        num_steps: the number of steps before ``end``. Ends after other numbers cannot be compared.
    """

    start: State
    end: State
    parameters: frozenset[str] = frozenset()
    precision: str = "fp32"
    num_steps: int = WEIGHT_STEPS

    @classmethod
    def begin(cls, model: nn.Module, precision: str, num_steps: int) -> WeightHistory:
        """The history before the first step of a run in a strategy's ``precision``. ``end`` is filled in later."""
        names = frozenset(name for name, _ in model.named_parameters())
        return cls(copied_state(model), {}, names, precision_of(model, precision), num_steps)


def changes_apart(own: WeightHistory, truth: WeightHistory) -> tuple[TensorChange, ...]:
    """The distance between the changes in two courses, for each tensor.

    It is infinite for a tensor that only one of them has, or that is finite in only one. For integers and flags it is
    zero or infinite.
    """
    names = dict.fromkeys([*truth.end, *own.end])
    return tuple(_change(name, own, truth) for name in names)


def _change(name: str, own: WeightHistory, truth: WeightHistory) -> TensorChange:
    is_parameter = name in truth.parameters
    missing = TensorChange(name, math.inf, 0.0, 0.0, 0.0, is_parameter)
    if name not in own.end or name not in truth.end or own.end[name].shape != truth.end[name].shape:
        return missing
    if not (truth.end[name].is_floating_point() or truth.end[name].is_complex()):
        return TensorChange(name, 0.0, 0.0, 0.0, 0.0) if torch.equal(own.end[name], truth.end[name]) else missing
    dtype = truth.end[name].dtype
    a0, a, b0, b = (wide(tensors[name].cpu()) for tensors in (own.start, own.end, truth.start, truth.end))
    is_same = (a == b) | (a.isnan() & b.isnan())
    is_broken = is_same & ~a.isfinite()  # nan or the same infinity on both: there is nothing to compare
    apart = ((a - a0) - (b - b0)).masked_fill(is_broken | is_same & (a0 == b0), 0)
    ours, theirs, end = (values.masked_fill(is_broken, 0) for values in (a - a0, b - b0, b))
    unit = TOLERANCES[_PRECISIONS.get(dtype.to_real(), "fp32")].unit
    rounding = unit * _norm(end.nan_to_num())
    return TensorChange(
        name, _norm(apart), _norm(theirs.nan_to_num()), _norm(ours.nan_to_num()), rounding, is_parameter
    )


def _norm(values: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(values))
    return norm if math.isfinite(norm) else math.inf
