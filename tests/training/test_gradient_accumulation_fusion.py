"""Large weights whose gradients are added up where they lie: the numbers of one device, and who does without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.training import whole
from tests.training.test_random_programs import assert_like_one_device
from workbench.core import gradient_accumulation
from workbench.tensors.dispatch import gradient_accumulation_fusion as fusion
from workbench.testing import run_ranks

NUM_WORDS, WIDTH, NUM_SAMPLES, LENGTH = 11, 8, 8, 5
PIPELINE = "words: data; body: data; norm: data@1; head: data@1 | 2x1x1 mb=4 {}"


class Words(nn.Module):
    """Words with a padding word, a layer, a head; tied, the head's weight is the table."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(NUM_WORDS, WIDTH, padding_idx=2)
        self.body, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_WORDS)
        if is_tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.body(self.words(x)))))


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, NUM_WORDS, (NUM_SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return words[:, :-1], words[:, 1:].contiguous()


def by_hand(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = [loss_of(model(part), labels) / 4 for part, labels in zip(inputs.chunk(4), targets.chunk(4), strict=True)]
    sum(losses).backward()  # type: ignore[union-attr]
    return torch.stack(losses).sum()


def train(model: nn.Module, step_of: Callable[..., torch.Tensor], keeps_zeros: bool = False) -> dict[str, torch.Tensor]:
    """Losses, gradients and weights of three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        optimizer.zero_grad(set_to_none=not keeps_zeros)
        found[f"loss {step}"] = whole(step_of(model, *batch_of(step)))
        found |= {f"{name}'s gradient {step}": whole(p.grad).clone() for name, p in model.named_parameters()}
        optimizer.step()
    return found | {name: whole(p) for name, p in model.named_parameters()}


def parallel_step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return wb.forward_backward(model, loss_of, inputs, targets)


def on_ranks(model: nn.Module, strategy: str, num_ranks: int, **how: Any) -> list[dict[str, torch.Tensor]]:
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    return run_ranks(lambda rank: train(wb.parallelize(models[rank], strategy), parallel_step, **how), num_ranks)


@pytest.fixture
def num_added(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every weight counts as large; filled with a word for every gradient that was added to another in place."""
    found: list[str] = []
    ask = fusion._gradient_to_add_to

    def note(weight: Any, running: Any, ctx: Any) -> torch.Tensor | None:
        total = ask(weight, running, ctx)
        if total is not None:
            found.append("added")
        return total

    monkeypatch.setattr(gradient_accumulation, "SMALLEST_NUMEL", 1)
    monkeypatch.setattr(fusion, "_gradient_to_add_to", note)
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("keeps_zeros", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("strategy", "num_ranks", "adds"), [
    (PIPELINE.format("1f1b"), 2, True),
    (PIPELINE.format("gpipe"), 2, True),
    (PIPELINE.format("1f1b recompute"), 2, False),  # a checkpoint saves tensors of torch's functions
    (PIPELINE.format("1f1b zero=1"), 2, True),
    (PIPELINE.format("zero_bubble"), 2, True),  # the first stage, whose backwards are whole
    ("words: data; body: data@1; norm: data@2; head: data@3 | 2x1x1 mb=4 interleaved", 2, True),
    ("words: data@0; body: data@1; norm: data@1; head: data@1 | 2x1x1 mb=4 zero_bubble zero=1", 2, True),
    ("*: data | 1x1x1 mb=4", 1, True),
    ("*: model | 1x1x2 mb=4", 2, True),
    ("*: data | 1x2x1 mb=4", 2, False),  # the sums of its gradients wait for each of them
    ("*: data | 1x2x1 mb=4 zero=2", 2, False),
    ("*: data | 1x2x1 mb=4 zero=3", 2, False),
])  # fmt: skip
def test_numbers_are_those_of_one_device(num_added, strategy, num_ranks, adds, is_tied, keeps_zeros):
    expected = train(Words(is_tied), by_hand, keeps_zeros)
    for found in on_ranks(Words(is_tied), strategy, num_ranks, keeps_zeros=keeps_zeros):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert bool(num_added) == adds


def test_every_micro_batch_but_the_first_adds_to_its_gradient(num_added):
    on_ranks(Words(), "*: data | 1x1x1 mb=4", 1)
    assert len(num_added) == 3 * 3 * 3  # steps, later micro-batches, weights with a product or rows


def test_a_gradient_that_is_there_before_the_step_is_added_to_at_once(num_added):
    on_ranks(Words(), "*: data | 1x1x1 mb=4", 1, keeps_zeros=True)
    assert len(num_added) == (3 + 4 + 4) * 3


def test_who_waits_for_a_gradient_gets_each_of_them(num_added):
    """A hook after accumulation sees the gradient of every micro-batch, as with torch alone."""
    sums: dict[str, list[float]] = {"torch": [], "ranks": []}

    def listen(model: nn.Module, name: str) -> nn.Module:
        for layer in (model.words, model.head):
            layer.weight.register_post_accumulate_grad_hook(lambda p: sums[name].append(float(p.grad.abs().sum())))
        return model

    def torch_step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = []
        for part, labels in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            losses.append(loss_of(model(part), labels) / 4)
            losses[-1].backward()
        return torch.stack(losses).sum()

    train(listen(Words(), "torch"), torch_step)
    model = Words()
    run_ranks(lambda rank: train(listen(wb.parallelize(model, "*: data | 1x1x1 mb=4"), "ranks"), parallel_step), 1)
    assert sorted(sums["ranks"]) == pytest.approx(sorted(sums["torch"]))
    assert len(sums["ranks"]) == 3 * 4 * 2
    assert len(num_added) == 3 * 3  # the layer between them, which nobody listens to


class OwnBias(nn.Module):
    """A bias that is computed, as a layer's is that is split by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.first(x).tanh(), self.second.weight, self.second.bias * 2)


class Latents(nn.Module):
    """A product of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.weight = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * F.linear(self.latents, self.weight))


class Probed(nn.Module):
    """A hook asks for another gradient while the backward runs: it leaves those of the weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def probe(_: torch.Tensor) -> None:
            again = x.detach().clone().requires_grad_()
            with torch.enable_grad():
                torch.autograd.grad(self.first(again).sum(), again)

        hidden = self.first(x).tanh()
        hidden.register_hook(probe)
        return self.head(hidden)


class Clamped(nn.Module):
    """A first layer whose weight is written between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.3, 0.3)
        return self.head(self.first(x).tanh())


class Stop(torch.autograd.Function):
    """A function whose gradient is none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        return None


class Stopped(nn.Module):
    """A table and a product whose results nobody learns from."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.side = nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stop = wb.local_map(Stop.apply, in_sbp=[wb.sbp.split(0)], out_sbp=wb.sbp.split(0))
        return self.head(x + stop(self.side(x)) + stop(self.words((x[:, 0] > 0).long())))


class ComplexNumbers(nn.Module):
    """Linear layers of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)
        self.head = nn.Linear(WIDTH, NUM_WORDS, dtype=torch.complex128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x.to(torch.complex128))).abs()


@pytest.mark.parametrize(("made", "strategy", "num_ranks"), [
    (OwnBias, "*: data | 1x1x1 mb=4", 1),
    (OwnBias, "first: data; second: data@1 | 2x1x1 mb=4 zero_bubble", 2),
    pytest.param(OwnBias, "first: data; second: model@1 | 2x1x2 mb=4 zero_bubble", 4, marks=pytest.mark.slow),
    (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_WORDS)),
     "0: data; 1: model@1; 2: model@1 | 2x1x2 mb=4 zero_bubble", 4),
    (Latents, "*: data | 1x1x1 mb=4", 1),
    (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Latents()),
     "0: data; 1: data@1; 1.head: data@1 | 2x1x1 mb=4 zero_bubble", 2),
    (Probed, "*: data | 1x1x1 mb=4", 1),
    (Clamped, "first: data; head: data@1 | 2x1x1 mb=4 gpipe", 2),
    (ComplexNumbers, "*: data | 1x1x1 mb=4", 1),
])  # fmt: skip
def test_gradients_of_odd_products_are_those_of_one_device(num_added, made, strategy, num_ranks):
    torch.manual_seed(0)
    model = made()
    model = model if made is ComplexNumbers else model.double()
    inputs, targets = torch.randn(NUM_SAMPLES, WIDTH).double(), torch.randint(0, NUM_WORDS, (NUM_SAMPLES,))

    def gradients(rank: int) -> dict[str, torch.Tensor]:
        parallel = wb.parallelize(models[rank], strategy)
        for _ in range(2):
            wb.forward_backward(parallel, F.cross_entropy, inputs, targets)
        return {name: whole(p.grad) for name, p in parallel.named_parameters()}

    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    for _ in range(2):
        for part, labels in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (F.cross_entropy(model(part), labels) / 4).backward()
    for found in run_ranks(gradients, num_ranks):
        for name, p in model.named_parameters():
            torch.testing.assert_close(
                found[name], p.grad, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
            )


def test_a_gradient_that_was_stopped_is_none_instead_of_zeros(num_added):
    model = Stopped().double()

    def learnt(rank: int) -> set[str]:
        parallel = wb.parallelize(model, "*: data | 1x1x1 mb=4")
        inputs, targets = torch.randn(NUM_SAMPLES, WIDTH).double(), torch.randint(0, NUM_WORDS, (NUM_SAMPLES,))
        wb.forward_backward(parallel, F.cross_entropy, inputs, targets)
        return {name for name, p in parallel.named_parameters() if p.grad is not None}

    assert run_ranks(learnt, 1) == [{"head.weight", "head.bias"}]


def test_a_captured_step_adds_as_it_was_recorded(num_added):
    def captured(rank: int) -> list[float]:
        model = wb.parallelize(Words(), "*: data | 1x1x1 mb=4")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        @wb.capture
        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = parallel_step(model, inputs, targets)
            optimizer.step()
            return loss

        return [float(whole(step(*batch_of(number)))) for number in range(4)]

    [found] = run_ranks(captured, 1)
    expected = train(Words(), by_hand)
    assert found[:3] == pytest.approx([float(expected[f"loss {number}"]) for number in range(3)], rel=1e-9)
    assert len(num_added) == 2 * 3 * 3  # a step that runs before the recording, and the recording itself


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_random_programs_whose_weights_all_count_as_large(num_added, seed):
    assert_like_one_device(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 240))
def test_many_random_programs_whose_weights_all_count_as_large(num_added, seed):
    assert_like_one_device(seed)
