"""Whole training runs, on ranks and on one device, and the comparison of losses, gradients and final weights.

One device means one rank through the same calls: the same micro-batches in the same order, the same random numbers.
``plainly`` is the same run without a line of the workbench in it, for models that drop nothing.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.training import whole
from tests.models.zoo import WORDS
from tests.models.zoo import make as make_transformer
from workbench.core.options import VIRTUAL_SCHEDULES
from workbench.core.presets import stage_cuts
from workbench.core.rows import Row
from workbench.core.strategy import Options, Strategy
from workbench.tensors.dispatch.fallback import FallbackWarning
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.parallel import describe

BATCH, LENGTH = 7, 6
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
}
KINDS = ("mlp", "cnn", "gpt2", "llama")
TRANSFORMERS = ("gpt2", "llama", "mixtral")


class ConvNet(nn.Module):
    """Two convolutions with batch norm, dropout, two linear layers."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.fc1, self.fc2 = nn.Dropout(rate), nn.Linear(8 * 4, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (batch, 1, 8, 8) -> scores (batch, 10)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 2)
        x = self.drop(F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def mlp(rate: float) -> nn.Sequential:
    """Four linear layers with dropout between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise([12, 24, 20, 16, 10]):
        layers += [nn.Linear(a, b), nn.ReLU(), nn.Dropout(rate)]
    return nn.Sequential(*layers[:-2])


@functools.cache
def _built(kind: str, rate: float, dtype: torch.dtype) -> nn.Module:
    if kind in TRANSFORMERS:
        return make_transformer(kind, "sdpa", rate).to(dtype)
    torch.manual_seed(0)
    return (mlp(rate) if kind == "mlp" else ConvNet(rate)).to(dtype)


@dataclass(frozen=True)
class Setup:
    """What is trained, apart from the strategy."""

    kind: str
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float32
    rate: float = 0.2
    num_steps: int = 20

    def model(self) -> nn.Module:
        """A copy of the model, for one rank. Not to be called on simulated ranks: torch's generator is shared."""
        return copy.deepcopy(_built(self.kind, self.rate, self.dtype))

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of a step; an odd number of samples."""
        generator = torch.Generator().manual_seed(100 + step)
        if self.kind in TRANSFORMERS:
            words = torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)
            return words, words
        shape = (BATCH, 12) if self.kind == "mlp" else (BATCH, 1, 8, 8)
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        return inputs, torch.randint(0, 10, (BATCH,), generator=generator)


def loss_of(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of classes, or of the next word."""
    if isinstance(output, torch.Tensor):
        return F.cross_entropy(output, targets)
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


@dataclass
class Run:
    """What a run leaves behind, as plain logical tensors."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def strategy_text(kind: str, parallel: str, options: str, model: nn.Module | None = None) -> str:
    """Rows ``parallel`` for all layers, cut into the stages of the options (``rows_of``); one row where that is one."""
    if num_stages_of(options) == 1:
        return f"{Strategy.from_rows([Row('*', parallel)], Options())} | {options}"
    return rows_of(model or _built(kind, 0.2, torch.float32), options, lambda: parallel)


def rows_of(model: nn.Module, options: str, parallel_of: Callable[[], str]) -> str:
    """A row for every layer, of what ``parallel_of`` says, cut by parameters into the stages of the options."""
    layers = describe(model)
    cuts = stage_cuts(layers, num_stages_of(options, len(layers)))
    rows = [Row(layer.name, parallel_of(), None, cut) for layer, cut in zip(layers, cuts, strict=True)]
    return f"{Strategy.from_rows(rows, Options())} | {options}"


def num_stages_of(options: str, num_layers: float = math.inf) -> int:
    """As many as the options' first degree says, or two for every rank where the schedule and the layers allow it."""
    degrees = options.split()[0]
    stages = degrees.count("+") + 1 if "+" in degrees else int(degrees.partition("x")[0])
    return 2 * stages if {*options.split()} & {*VIRTUAL_SCHEDULES} and 2 * stages <= num_layers else stages


def train(setup: Setup, model: nn.Module, optimizer: Any, run: Run, steps: range, graded: tuple[int, ...]) -> None:
    """Steps of a parallelized model; every rank calls it."""
    generator = current().context.generator = torch.Generator()
    for step in steps:
        generator.manual_seed(step)
        inputs, targets = setup.batch(step)
        optimizer.zero_grad()
        run.losses.append(float(whole(wb.forward_backward(model, loss_of, inputs, targets))))
        if step in graded:
            run.grads.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
        optimizer.step()


def on_ranks(setup: Setup, strategy: str, num_ranks: int) -> list[Run]:
    """Every rank's record of the run."""
    models = [setup.model() for _ in range(num_ranks)]
    return run_ranks(lambda rank: on_this_rank(setup, models[rank], strategy), num_ranks)


def on_this_rank(setup: Setup, model: nn.Module, strategy: str) -> Run:
    """The run on one of the ranks of the world."""
    run, model = Run(), wb.parallelize(model, strategy)
    optimizer = OPTIMIZERS[setup.optimizer](model.parameters())
    train(setup, model, optimizer, run, range(setup.num_steps), (0, setup.num_steps - 1))
    run.weights = {name: whole(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return run


@functools.cache
def on_one_device(setup: Setup, num_micro_batches: int) -> Run:
    """The truth."""
    return on_ranks(setup, f"*: data | mb={num_micro_batches}", 1)[0]


def assert_trains_like_one_device(setup: Setup, parallel: str, options: str, num_ranks: int) -> None:
    """Rows ``parallel`` for all layers, with options."""
    text = strategy_text(setup.kind, parallel, options)
    truth = on_one_device(setup, Strategy(text).options.num_micro_batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for found in on_ranks(setup, text, num_ranks):
            assert_runs_agree(found, truth, setup)


def plainly(setup: Setup, num_micro_batches: int) -> Run:
    """The run in plain torch, of a model that drops nothing."""
    model, run = replace(setup, rate=0.0).model(), Run()
    optimizer = OPTIMIZERS[setup.optimizer](model.parameters())
    for step in range(setup.num_steps):
        inputs, targets = setup.batch(step)
        optimizer.zero_grad()
        run.losses.append(0.0)
        for part, labels in zip(*(tensor.tensor_split(num_micro_batches) for tensor in (inputs, targets)), strict=True):
            loss = loss_of(model(part), labels) * (len(part) / len(inputs))
            loss.backward()
            run.losses[-1] += loss.item()
        if step in (0, setup.num_steps - 1):
            run.grads.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
        optimizer.step()
    run.weights = {name: whole(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return run


def assert_runs_agree(found: Run, truth: Run, setup: Setup) -> None:
    """Losses within 1e-5 (64 bits: 1e-9), gradients and weights within ten times that of their largest elements.

    Gradients that are zero but for rounding (biases of keys) are measured against a hundredth of the largest of all.
    AdamW makes whole steps of such rounding in 32 bits, so weights count under SGD or in 64 bits.
    """
    limit = 1e-5 if setup.dtype == torch.float32 else 1e-9
    assert len(found.losses) == len(truth.losses) == setup.num_steps
    for step, (ours, theirs) in enumerate(zip(found.losses, truth.losses, strict=True)):
        assert abs(ours - theirs) <= limit * max(1.0, abs(theirs)), f"loss of step {step}: {ours} instead of {theirs}"
    for ours, theirs in zip(found.grads, truth.grads, strict=True):
        largest = max(float(grad.abs().max()) for grad in theirs.values() if grad is not None)
        for name, grad in theirs.items():
            assert (ours[name] is None) == (grad is None), f"gradient of {name} is missing on one side"
            if grad is not None:
                _assert_close(ours[name], grad, 10 * limit, largest / 100, f"gradient of {name}")
    if setup.optimizer == "sgd" or setup.dtype == torch.float64:
        assert found.weights.keys() == truth.weights.keys()
        for name, weight in truth.weights.items():
            _assert_close(found.weights[name], weight, 10 * limit, 1e-2, name)


def _assert_close(found: Any, truth: torch.Tensor, rtol: float, floor: float, what: str) -> None:
    assert found.shape == truth.shape and found.dtype == truth.dtype, f"{what}: {found.shape}, {found.dtype}"
    difference = float((found.double() - truth.double()).abs().max()) if truth.numel() else 0.0
    allowed = rtol * max(float(truth.double().abs().max()) if truth.numel() else 0.0, floor)
    assert difference <= allowed, f"{what}: differs by {difference:.2e}, allowed are {allowed:.2e}"
