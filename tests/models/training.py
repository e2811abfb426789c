"""Two training steps of a model on one device and on ranks, and the comparison of everything that comes out."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.spread import ranks_of, spread
from tests.models.zoo import batch_for, make
from workbench.tensors.dispatch import fallback
from workbench.tensors.global_tensor import GlobalTensor
from workbench.testing import run_ranks

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # Where a gradient is zero but for rounding (the biases of keys), AdamW would blow the rounding up to a whole step.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4),
}


@dataclass
class Record:
    """What two steps leave behind, as plain tensors."""

    logits: torch.Tensor
    loss: torch.Tensor
    grads: dict[str, torch.Tensor | None]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """A model and how its numbers are made."""

    name: str
    attention: str = "eager"
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float32
    padded: bool = False
    dropout: float = 0.0
    experts: str = "grouped_mm"
    recomputes: bool = False
    autocasts: bool = False

    def build(self) -> nn.Module:
        model = make(self.name, self.attention, self.dropout, self.experts).to(self.dtype)
        if self.recomputes:
            model.activation_checkpointing_enable()
        return model

    def batch(self) -> dict[str, torch.Tensor]:
        batch = batch_for(self.name, self.padded)
        return {k: v.to(self.dtype) if v.is_floating_point() else v for k, v in batch.items()}


def two_steps(model: nn.Module, batch: dict[str, Any], setup: Setup) -> Record:
    """Forward, backward, step, twice; the first step's outputs and gradients and the weights after both."""
    optimizer = OPTIMIZERS[setup.optimizer](model.parameters())
    first: Record | None = None
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=setup.autocasts):
            output = model(**batch)
        loss = output.loss
        if setup.dtype == torch.float64:  # the models' own losses are computed in 32 bits
            loss = F.cross_entropy(output.logits.flatten(0, -2), batch["labels"].flatten())
        loss.backward()
        if first is None:
            grads = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
            first = Record(whole(output.logits), whole(loss), grads, {})
        optimizer.step()
    first.weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return first


def whole(tensor: Any) -> Any:
    """The logical tensor, plain, on every rank of the world."""
    if isinstance(tensor, GlobalTensor):
        return tensor.detach().to_global(placement=wb.placement.all("cpu"), sbp="B").full_tensor()
    return None if tensor is None else tensor.detach().clone()


def on_one_device(setup: Setup) -> Record:
    """The truth."""
    return two_steps(setup.build(), setup.batch(), setup)


def on_ranks(setup: Setup, way: str, num_ranks: int | None = None) -> tuple[list[Record], set[str]]:
    """Every rank's record, and the functions that gathered for want of a rule.

    Args:
        setup: the model.
        way: a mode of ``spread``, or a strategy for ``wb.parallelize`` where ``num_ranks`` is given.
        num_ranks: ranks of the strategy.
    """
    models = [setup.build() for _ in range(num_ranks or ranks_of(way))]
    names = [name for name, _ in models[0].named_parameters()]
    batch = setup.batch()

    def program(rank: int) -> Record:
        if num_ranks:
            model, inputs = wb.parallelize(models[rank], way), batch
        else:
            model, inputs = spread(models[rank], batch, way)
        assert [name for name, _ in model.named_parameters()] == names, "tied parameters came apart"
        return two_steps(model, inputs, setup)

    fallback._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fallback.FallbackWarning)
        records = run_ranks(program, len(models))
    return records, {str(w.message).partition(":")[0] for w in caught if w.category is fallback.FallbackWarning}


def assert_records_agree(found: Record, truth: Record, rtol: float) -> None:
    """Every tensor within ``rtol`` of the largest element of the true one.

    Gradients that are zero but for rounding are measured against a hundredth of the model's largest gradient.
    """
    largest = max(float(grad.abs().max()) for grad in truth.grads.values() if grad is not None)
    assert_close(found.logits, truth.logits, rtol, 0.0, "logits")
    assert_close(found.loss, truth.loss, rtol, 0.0, "loss")
    for name, grad in truth.grads.items():
        theirs = found.grads[name]
        assert (theirs is None) == (grad is None), f"gradient of {name} is missing on one side"
        if grad is not None:
            assert_close(theirs, grad, rtol, largest / 100, f"gradient of {name}")
    for name, weight in truth.weights.items():
        assert_close(found.weights[name], weight, rtol, 0.0, f"{name} after two steps")


def assert_close(found: torch.Tensor, truth: torch.Tensor, rtol: float, floor: float, what: str) -> None:
    """Largest difference against the largest element of ``truth``, or ``floor`` if that is more."""
    assert found.shape == truth.shape, f"{what}: shape {tuple(found.shape)} instead of {tuple(truth.shape)}"
    assert found.dtype == truth.dtype, f"{what}: {found.dtype} instead of {truth.dtype}"
    difference = float((found - truth).abs().max())
    limit = rtol * max(float(truth.abs().max()), floor)
    assert difference <= limit, f"{what}: differs by {difference:.2e}, allowed are {limit:.2e}"
