"""Odd models under strategies, losses, optimizers and loops that a seed chooses, against plain torch on one device."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.training import whole
from tests.training.odd_models import MODELS, NUM_CLASSES, EncoderAndDecoder, inputs_of
from tests.training.training_runs import num_stages_of, rows_of
from workbench.core.options import V_SCHEDULES
from workbench.core.strategy import Strategy
from workbench.tensors.dispatch.dispatcher import FallbackWarning
from workbench.testing import run_ranks
from workbench.training.parallel import describe

NUM_STEPS, CHANGES_AT = 5, 3
SHAPES = [
    ("data", "1x2x1", 2),
    ("model", "1x1x2", 2),
    ("either", "1x1x2 mb=2", 2),
    ("model", "1x1x2 sequence", 2),
    ("data", "2x1x1 mb=3 1f1b", 2),
    ("data", "2x1x1 mb=4 interleaved", 2),
    ("data", "2x1x1 mb=3 zero_bubble", 2),
    ("data", "2x1x1 mb=3 zero_bubble_v recompute", 2),
    ("data", "2x1x1 mb=4 dualpipe_v", 2),
    ("data", "2x1x1 mb=3 1f1b recompute", 2),
    ("data", "1x2x1 mb=2 zero=1", 2),
    ("data", "1x2x1 mb=2 zero=3", 2),
    ("data", "1x3x1 mb=2 zero=2", 3),
    ("model", "1x1x3 mb=2", 3),
    ("model", "1x2+1x1 mb=3 1f1b", 3),
    ("data", "3x1x1 mb=2 gpipe", 3),
    ("data", "2x2x1 mb=2 gpipe", 4),
    ("model", "1x2x2 zero=3", 4),
    ("model", "1x2x2 recompute mb=2", 4),
    ("either", "2x1x2 mb=3 1f1b", 4),
    ("either", "1x2x2 mb=2 zero=2", 4),
    ("model", "2x2x1 mb=3 zero_bubble zero=1", 4),
]
"""Rows (each data or model, where either), options, ranks."""


def one_hot(targets: torch.Tensor) -> torch.Tensor:
    return F.one_hot(targets, NUM_CLASSES).double()


LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "smoothed": lambda output, targets: F.cross_entropy(output, targets, label_smoothing=0.1),
    "margin": F.multi_margin_loss,
    "logits": lambda output, targets: F.binary_cross_entropy_with_logits(output, one_hot(targets)),
    "huber": lambda output, targets: F.huber_loss(output, one_hot(targets)),
    "divergence": lambda output, targets: F.kl_div(
        output.log_softmax(-1), one_hot(targets) * 0.8 + 0.02, reduction="batchmean"
    ),
    "gathered": lambda output, targets: -output.softmax(1).gather(1, targets[:, None]).add(1e-3).log().mean(),
}


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Weights that decay, and the others."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.ndim > 1].append(parameter)
    return [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}]


# None that takes a gradient's sign for its size: of a gradient that is zero but for rounding, it is anybody's.
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(decayed(model), lr=3e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=2e-3),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "adamax": lambda model: torch.optim.Adamax(model.parameters()),
}
HABITS = ("clip", "clip values", "accumulate", "freeze", "change", "evaluate", "schedule", "uneven", "keep zeros")


@dataclass(frozen=True)
class Program:
    """What is trained, how, and under what; ``then`` is the strategy from step 3 on."""

    model: nn.Module
    strategy: str
    then: str
    num_ranks: int
    loss: str
    optimizer: str
    habits: frozenset[str]

    @property
    def takes(self) -> str:
        return str(self.model.takes)

    def strategy_at(self, step: int) -> str:
        return self.then if step >= CHANGES_AT else self.strategy

    def batch(self, step: int, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        inputs = inputs_of(self.takes, num_samples, generator)
        return inputs, torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)


def draw(seed: int) -> Program:
    """The program of a seed."""
    draws = random.Random(seed)
    torch.manual_seed(seed)
    model = MODELS[draws.choice(sorted(MODELS))]().double()
    habits = frozenset(draws.sample(HABITS, draws.randint(0, 4)))
    num_ranks = draws.choice((2, 2, 3, 4))
    shapes = [(parallel, options) for parallel, options, ranks in SHAPES if ranks == num_ranks and fits(model, options)]
    strategy = strategy_of(model, *draws.choice(shapes), draws)
    then = strategy_of(model, *draws.choice(shapes), draws) if "change" in habits else strategy
    return Program(
        model, strategy, then, num_ranks, draws.choice(sorted(LOSSES)), draws.choice(sorted(OPTIMIZERS)), habits
    )


def fits(model: nn.Module, options: str) -> bool:
    """Whether a V finds two stages for each rank."""
    return not {*options.split()} & {*V_SCHEDULES} or len(describe(model)) >= num_stages_of(options)


def strategy_of(model: nn.Module, parallel: str, options: str, draws: random.Random) -> str:
    """Rows for all layers, each drawn where either is allowed, cut by parameters into the stages of the options."""
    return rows_of(model, options, lambda: draws.choice(("data", "model")) if parallel == "either" else parallel)


Step = Callable[[Program, nn.Module, str, torch.Tensor, torch.Tensor], float]


def by_hand(program: Program, model: nn.Module, strategy: str, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Losses and gradients of one device: the same micro-batches, in order."""
    total = 0.0
    num_parts = Strategy(strategy).options.num_micro_batches
    for part, labels in zip(inputs.tensor_split(num_parts), targets.tensor_split(num_parts), strict=True):
        loss = LOSSES[program.loss](model(part), labels) * (len(part) / len(inputs))
        loss.backward()
        total += loss.item()
    return total


def by_ranks(program: Program, model: nn.Module, strategy: str, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float(whole(wb.forward_backward(model, LOSSES[program.loss], inputs, targets)))


def train(program: Program, model: nn.Module, forward_backward: Step) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Every number on the way, and the state at the end."""
    found: list[float] = []
    habits, optimizer = program.habits, OPTIMIZERS[program.optimizer](model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS) if "schedule" in habits else None
    for step in range(NUM_STEPS):
        if forward_backward is by_ranks and step == CHANGES_AT and program.then != program.strategy:
            wb.parallelize(model, program.then, optimizer=optimizer)
        if "freeze" in habits and step in (1, 3):
            for _, parameter in sorted(model.named_parameters())[::3]:
                parameter.requires_grad_(step == 3)
        optimizer.zero_grad(set_to_none="keep zeros" not in habits)
        for number in range(2 if "accumulate" in habits else 1):
            inputs, targets = program.batch(10 * step + number, 5 if "uneven" in habits and step % 2 else 8)
            found.append(forward_backward(program, model, program.strategy_at(step), inputs, targets))
        if "clip" in habits:
            found.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        if "clip values" in habits:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if "evaluate" in habits:
            model.eval()
            with torch.no_grad():
                found.append(float(whole(model(program.batch(99, 6)[0]).sum())))
            model.train()
    state = {name: whole(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return found, state


def on_ranks(program: Program) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    models = [copy.deepcopy(program.model) for _ in range(program.num_ranks)]
    return run_ranks(
        lambda rank: train(program, wb.parallelize(models[rank], program.strategy), by_ranks), program.num_ranks
    )


def assert_like_one_device(seed: int) -> None:
    """All ranks have the numbers and the state of plain torch, in 64 bits; a failure tells the whole program."""
    program = draw(seed)
    numbers, state = train(program, copy.deepcopy(program.model), by_hand)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        warnings.filterwarnings("ignore", "parallelize: row .* splits no weight")
        ranks = on_ranks(program)
    for found, found_state in ranks:
        assert found == pytest.approx(numbers, rel=1e-8, abs=1e-8), program
        assert found_state.keys() == state.keys(), program
        for name, expected in state.items():
            torch.testing.assert_close(
                found_state[name],
                expected,
                rtol=1e-6,
                atol=1e-7,
                msg=lambda text, name=name: f"{name}: {text}\n{program}",
            )


@pytest.mark.sampled(12, start=8)
@pytest.mark.parametrize("seed", range(12))
def test_a_program_gives_the_numbers_of_one_device(seed: int) -> None:
    assert_like_one_device(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 312))
def test_many_programs_give_the_numbers_of_one_device(seed: int) -> None:
    assert_like_one_device(seed)


@pytest.mark.slow
def test_programs_have_every_model_and_every_habit() -> None:
    programs = [draw(seed) for seed in range(312)]
    assert {type(program.model).__name__ for program in programs} == set(MODELS)
    assert set().union(*(program.habits for program in programs)) == set(HABITS)
    assert {program.loss for program in programs} == set(LOSSES)
    assert {program.optimizer for program in programs} == set(OPTIMIZERS)


def test_the_comparison_notices_a_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    by_one_device = by_hand
    monkeypatch.setattr(f"{__name__}.by_hand", lambda *given: by_one_device(*given) + 1e-6)
    with pytest.raises(AssertionError):
        assert_like_one_device(8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", V_SCHEDULES)
def test_a_block_that_takes_from_another_stage_of_its_rank_runs_again(schedule: str) -> None:
    """A decoder takes what the encoder has made; in a V both may be on one rank."""
    model = EncoderAndDecoder().double()
    inputs, targets = inputs_of(model.takes, 6, torch.Generator().manual_seed(0)), torch.zeros(6, dtype=torch.long)
    models = [copy.deepcopy(model) for _ in range(2)]
    strategy = rows_of(model, f"2x1x1 mb=3 {schedule} recompute", lambda: "data")

    def gradients(rank: int) -> list[torch.Tensor]:
        parallel = wb.parallelize(models[rank], strategy)
        wb.forward_backward(parallel, F.cross_entropy, inputs, targets)
        return [whole(parameter.grad) for parameter in parallel.parameters()]

    F.cross_entropy(model(inputs), targets).backward()
    for found in run_ranks(gradients, 2):
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
