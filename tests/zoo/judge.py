"""Trains a model of the zoo on one device and under a strategy in 64 bits, and says whether the numbers are equal."""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import workbench as wb
from tests.zoo.model import Model
from workbench.tensors.dispatch import fallback
from workbench.testing import run_ranks
from workbench.training.batches import call

STRATEGIES = {
    "data": ("*: data", 2, 1),
    "model": ("*: model", 2, 1),
    "1x2x2": ("*: model | 1x2x2", 4, 1),
    "zero=3": ("*: data | zero=3", 2, 1),
    "pipeline": ("pipeline | mb=2", 2, 2),
}
"""Strategy, ranks and micro-batches by the name of their column."""
STEPS, LARGEST_CHANGE = 3, 0.01
"""Steps of plain gradient descent, the first of which changes some weight by this and none by more."""
LARGEST = 15_000_000
"""Parameters of a model that is tried."""
TOLERANCE = 1e-4
"""Of the model's largest gradient or change: many models compute their loss in 32 bits whatever their weights are."""


@dataclass
class Outcome:
    """What came of one model under one strategy.

    Attributes:
        kind: "equal", "wrong", "refused" (an error of the workbench), "unclear" (another error).
        text: the error's type and message, or the largest difference and where it is.
        gathered: functions that fell back to gathering.
    """

    kind: str
    text: str = ""
    gathered: list[str] = field(default_factory=list)


@dataclass
class Trained:
    """Losses of each step, gradients of the first one, weights after the last."""

    losses: list[float]
    grads: dict[str, torch.Tensor | None]
    weights: dict[str, torch.Tensor]


@dataclass
class Subject:
    """A module in training mode whose numbers are repeated exactly, and its batch."""

    module: nn.Module
    batch: Any
    loss_fn: Any

    @classmethod
    def of(cls, model: Model, dtype: torch.dtype = torch.float64) -> Subject:
        """Without dropout, with weights that are all different: zeros and ones could hide mistakes.

        In 64 bits; in 32 if the model mixes precisions of its own.
        """
        torch.manual_seed(0)
        module, batch = model.make()
        if (size := sum(p.numel() for p in module.parameters())) > LARGEST:
            raise ValueError(f"{size:,} parameters: no small configuration")
        module = module.to(dtype).train()
        for part in module.modules():
            drops = any(word in type(part).__name__ for word in ("Drop", "StochasticDepth"))
            for rate in ({"p", "drop_prob", "drop_rate"} if drops else {"drop_rate"}) & set(vars(part)):
                setattr(part, rate, 0.0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        batch = tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, batch)
        return cls(module, batch, model.loss_fn)

    def on_one_device(self, num_micro_batches: int = 1) -> Trained:
        """Trained by plain torch, gradients summed over micro-batches."""
        module = copy.deepcopy(self.module)
        parts = [_part(copy.deepcopy(self.batch), i, num_micro_batches) for i in range(num_micro_batches)]

        def step() -> torch.Tensor:
            losses = [self._loss(module, part) / num_micro_batches for part in parts]
            for loss in losses:
                loss.backward()
            return sum(loss.detach() for loss in losses)  # type: ignore[return-value]

        return _train(module, step)

    def own_noise(self, truth: Trained, num_micro_batches: int = 1) -> float:
        """How far rounding alone takes one device: the largest difference after a rounding unit in every weight."""
        other = Subject(copy.deepcopy(self.module), self.batch, self.loss_fn)
        with torch.no_grad():
            for parameter in other.module.parameters():
                parameter.mul_(1 + torch.randn_like(parameter) * torch.finfo(parameter.dtype).eps)
        return _difference(other.on_one_device(num_micro_batches), truth)[0]

    def on_ranks(self, strategy: str, num_ranks: int) -> list[Trained]:
        """What each rank has after the same steps under the strategy."""
        copies = [copy.deepcopy((self.module, self.batch)) for _ in range(num_ranks)]  # some models write into a batch

        def program(rank: int) -> Trained:
            module, batch = copies[rank]
            module = wb.parallelize(module, strategy)
            inputs, targets = (batch, None) if self.loss_fn is None else batch
            return _train(module, lambda: wb.forward_backward(module, self.loss_fn, inputs, targets))

        return run_ranks(program, num_ranks)

    def _loss(self, module: nn.Module, batch: Any) -> torch.Tensor:
        if self.loss_fn is not None:
            return self.loss_fn(call(module, batch[0]), batch[1])
        output = module(**batch)
        return output["loss"] if isinstance(output, dict) else output[0]


def judge(subject: Subject, strategy: str, num_ranks: int, truth: Trained) -> Outcome:
    """The model's numbers under a strategy beside those of one device."""
    fallback._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", fallback.FallbackWarning)
        try:
            runs = subject.on_ranks(strategy, num_ranks)
        except wb.errors.WorkbenchError as error:
            says_why = not isinstance(error, wb.errors.CollectiveAborted)
            return Outcome("refused" if says_why else "unclear", _told(error))
        except Exception as error:  # noqa: BLE001 - each model has its own
            return Outcome("unclear", _told(error))
    gathered = sorted({str(w.message).partition(":")[0] for w in caught if w.category is fallback.FallbackWarning})
    differences = [_difference(run, truth) for run in runs]
    largest, where = max(differences)
    kind = "equal" if largest <= TOLERANCE else "wrong"
    return Outcome(kind, f"{largest:.1e} {where}", gathered)


def _train(module: nn.Module, step: Any) -> Trained:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    losses, grads = [], {}
    for i in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step()))
        if i == 0:
            grads = _whole({name: p.grad for name, p in module.named_parameters()})
            optimizer.param_groups[0]["lr"] = LARGEST_CHANGE / (_largest(grads) or 1.0)
        optimizer.step()
    return Trained(losses, grads, _whole(dict(module.named_parameters())))


def _whole(tensors: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    """Plain logical tensors, on every rank of the world."""
    tensors = {name: None if tensor is None else tensor.detach() for name, tensor in tensors.items()}
    are_global = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, wb.GlobalTensor)}
    if are_global:
        moved = wb.to_global(list(are_global.values()), placement=wb.placement.all("cpu"), sbp="B")
        tensors |= {name: tensor.full_tensor() for name, tensor in zip(are_global, moved, strict=True)}
    return {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}


def _difference(run: Trained, truth: Trained) -> tuple[float, str]:
    """The largest difference relative to the largest number of its kind, and where it is."""
    scale = _largest(truth.grads)
    found = [
        (abs(a - b) / max(abs(b), 1.0), f"loss {i}")
        for i, (a, b) in enumerate(zip(run.losses, truth.losses, strict=True))
    ]
    for name, wanted in truth.grads.items():
        found.append((_distance(run.grads.get(name), wanted, scale), f"gradient {name}"))
        found.append((_distance(run.weights.get(name), truth.weights[name], LARGEST_CHANGE * STEPS), f"weight {name}"))
    return max((torch.inf if value != value else value, where) for value, where in found)


def _largest(grads: dict[str, torch.Tensor | None]) -> float:
    return max((g.abs().max().item() for g in grads.values() if g is not None and g.numel()), default=0.0)


def _distance(given: torch.Tensor | None, wanted: torch.Tensor | None, scale: float) -> float:
    if wanted is None or given is None:  # a gradient that nothing asks for may be missing or zero
        left = given if wanted is None else wanted
        return 0.0 if left is None or not left.count_nonzero() else torch.inf
    if given.shape != wanted.shape:
        return torch.inf
    return (given - wanted).abs().max().item() / (scale or 1.0) if wanted.numel() else 0.0


def _part(batch: Any, index: int, num_parts: int) -> Any:
    """A micro-batch: samples lie along dim 0 of what has as many rows as the first tensor, or several patches each."""

    def is_list(value: Any) -> bool:
        return isinstance(value, list)

    rows = len(next(leaf for leaf in tree_leaves(batch, is_list) if isinstance(leaf, torch.Tensor | list)))

    def cut(value: Any, are_patches: bool = False) -> Any:
        if isinstance(value, list):  # a dict or a tensor for each sample
            return value[index * rows // num_parts : (index + 1) * rows // num_parts]
        if isinstance(value, torch.Tensor) and value.ndim and (len(value) == rows or are_patches):
            return value.chunk(num_parts)[index]
        return value

    if num_parts == 1:
        return batch
    if isinstance(batch, dict):
        return {name: cut(value, are_patches=name == "pixel_values") for name, value in batch.items()}
    return tree_map(cut, batch, is_leaf=is_list)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: " + re.sub(r"\s+", " ", str(error))[:600]
