"""Whole comparisons on simulated ranks: right runs are equal however their rounding grows, wrong ones are not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.session.simulated_session import SimulatedSession
from tests.training.strategies.mixtures import Mixture, batch_of
from workbench.core.metrics import RunRecord
from workbench.errors import RunError
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject
from workbench.session.on_engine import shell

STEPS = 12
SLOW = pytest.mark.slow  # one more case of what the others show


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "publish", lambda message: None)
    monkeypatch.setattr(shell, "commands", list)


def is_spread(value: Any) -> bool:
    """Whether this is a strategy's run: planted mistakes happen only there. One device may be a world of one rank."""
    return isinstance(value, wb.GlobalTensor) and wb.world_size() > 1


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.again, self.norm_again = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm(self.conv(x)))
        return F.relu(self.norm_again(self.again(inner)) + self.short(x))


def resnet() -> nn.Module:
    """Deep enough, and trained fast enough, that rounding doubles from step to step."""
    widths = (3, 8, 8, 16, 16, 24, 24)
    blocks = [Block(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(32, 3, 8, 8, generator=generator), torch.randint(0, 10, (32,), generator=generator)


class Words(nn.Module):
    """A language model with a buffer that ``state_dict`` does not keep, and norms in 32 bits whatever the model has."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.mix, self.norm, self.dropout = nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(options.get("rate", 0.0))
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16), persistent=False)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x) * self.scale
        if self.options.get("drawn_twice") and is_spread(hidden):
            self.dropout(hidden)
        hidden = self.dropout(hidden)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = F.layer_norm(hidden.float(), (16,), self.norm.weight.float(), self.norm.bias.float()).to(hidden.dtype)
        return self.head(F.gelu(self.mix(hidden)))


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, 20, (32, 7), generator=torch.Generator().manual_seed(3))
    return words, words.roll(1, 1)


def word_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def features() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 8, generator=generator), torch.randint(0, 4, (32,), generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fast_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def judged(
    model_fn: Callable[[], nn.Module],
    dataset: Any,
    loss_fn: Any,
    strategy: str = "*: data",
    optimizer_fn: Any = sgd,
    steps: int = STEPS,
    session: SimulatedSession | None = None,
) -> RunRecord:
    subject = Subject.of(model_fn, dataset, loss_fn, optimizer_fn=optimizer_fn, batch_size=8, steps=steps)
    with Comparison(session or SimulatedSession(), subject) as comparison:  # type: ignore[arg-type]
        return comparison.start(strategy).result()


# ---- right runs ----------------------------------------------------------------------------------------------------

STRATEGIES = (
    "*: data",
    "*: model",
    pytest.param("*: data | zero=3", marks=SLOW),
    pytest.param("*: data | mb=4", marks=SLOW),
    "*: data | bf16",
    pytest.param("*: model | bf16", marks=SLOW),
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resnet_whose_rounding_doubles_every_step_is_equal(strategy: str):
    run = judged(resnet, images(), F.cross_entropy, strategy, fast_sgd)
    assert run.equal, run.verdict
    assert run.verdict.largest > 1e-5, "or this test says nothing"
    assert len(run.verdict.differences) == STEPS and max(run.verdict.differences) == run.verdict.largest


@pytest.mark.sampled(5)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer_fn", [sgd, adamw])
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_a_language_model_with_a_buffer_that_is_not_kept_is_equal(strategy: str, optimizer_fn: Any, rate: float):
    run = judged(lambda: Words(rate=rate), sentences(), word_loss, strategy, optimizer_fn)
    assert run.equal, run.verdict
    assert run.weight_difference is not None and run.weight_difference < 1


def test_slices_of_the_sequence_and_spread_experts_are_equal():
    x, classes = batch_of(0, 32)
    slices = judged(lambda: Words(rate=0.2), sentences(), word_loss, "*: data | context=2")
    experts = judged(Mixture, (x.float(), classes), None, "*: expert")
    assert slices.equal and experts.equal, (slices.verdict, experts.verdict)


def test_dropout_without_a_module_is_noticed():
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.fc(x), 0.3, self.training)

    assert judged(Drops, features(), F.cross_entropy).equal


def test_in_float64_a_right_run_is_equal_and_one_that_is_off_by_1e_6_is_not():
    def double() -> nn.Module:
        return mlp().double()

    def off(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, targets) * (1 + 1e-6 * is_spread(output))

    inputs, classes = features()
    assert judged(double, (inputs.double(), classes), F.cross_entropy).equal
    assert judged(double, (inputs.double(), classes), off).equal is False


def test_a_clear_case_costs_nothing_and_what_was_asked_once_is_remembered():
    session = SimulatedSession()
    judged(mlp, features(), F.cross_entropy, session=session)
    assert session.submitted == ["keep_job", "train_one_device", "train_strategy", "forget_job"]


def test_noise_and_one_device_are_trained_once_for_all_strategies():
    """And what fp32 has shown of a strategy is not asked again in bf16."""
    session = SimulatedSession()
    subject = Subject.of(resnet, images(), F.cross_entropy, optimizer_fn=sgd, batch_size=8, steps=STEPS)
    with Comparison(session, subject) as comparison:  # type: ignore[arg-type]
        for strategy in ("*: model", "*: data"):
            assert comparison.start(strategy).result().equal
        assert session.submitted.count("train_one_device") <= 3
        asked = session.submitted.count("train_strategy")
        run = comparison.start("*: data | bf16").result()
    assert run.equal and session.submitted.count("train_strategy") == asked + 1


def test_one_device_trains_no_more_than_is_compared():
    subject = Subject.of(mlp, features(), F.cross_entropy, batch_size=8, steps=50)
    with Comparison(SimulatedSession(), subject) as comparison:  # type: ignore[arg-type]
        run, baseline = comparison.start("*: data").result(), comparison.baseline()
        assert baseline is not None
        assert (len(run.losses), len(baseline.losses), run.equal) == (50, 20, True)
        assert len(comparison.start("*: data", num_steps=3).result().losses) == 3


def test_without_steps_to_check_there_is_no_one_device_run():
    session = SimulatedSession()
    subject = Subject.of(mlp, features(), F.cross_entropy, batch_size=8, steps=STEPS)
    with Comparison(session, subject, check_steps=0) as comparison:  # type: ignore[arg-type]
        run = comparison.start("*: data").result()
        assert comparison.baseline() is None
    assert run.equal is None and run.speedup is None and "train_one_device" not in session.submitted


# ---- wrong runs ----------------------------------------------------------------------------------------------------


def changed_sgd(**changes: float) -> Callable[[Any], torch.optim.Optimizer]:
    """SGD whose options are others where parameters are spread."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
        return torch.optim.SGD(parameters, **(options | (changes if is_spread(parameters[0]) else {})))

    return make


def changed_adamw(**changes: Any) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        options = {"lr": 1e-3, "betas": (0.9, 0.999)}
        return torch.optim.AdamW(parameters, **(options | (changes if is_spread(parameters[0]) else {})))

    return make


OPTIMIZERS = {
    "learning rate off by 1%": changed_sgd(lr=0.101),
    "momentum 0.89": changed_sgd(momentum=0.89),
    "no weight decay": changed_sgd(weight_decay=0.0),
    "AdamW, learning rate off by 1%": changed_adamw(lr=1.01e-3),
    "AdamW, other betas": changed_adamw(betas=(0.9, 0.99)),
    "AdamW, amsgrad": changed_adamw(betas=(0.8, 0.999)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mistake", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["*: data", "*: data | bf16", pytest.param("*: model", marks=SLOW)])
@pytest.mark.parametrize("kind", ["words", pytest.param("images", marks=SLOW)])
def test_an_optimizer_that_is_slightly_off_is_found(mistake: str, strategy: str, kind: str):
    model_fn, data, loss = (Words, sentences(), word_loss) if kind == "words" else (resnet, images(), F.cross_entropy)
    run = judged(model_fn, data, loss, strategy, OPTIMIZERS[mistake])
    assert run.equal is False, run.verdict


def scaled(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return word_loss(output, targets) * (2 if is_spread(output) else 1)


def smoothed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    smoothing = 0.01 if is_spread(output) else 0.0
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("loss_fn", [scaled, smoothed])
def test_a_loss_that_is_another_one_is_found(loss_fn: Any):
    assert judged(Words, sentences(), loss_fn).equal is False


def test_dropout_that_is_drawn_twice_is_found():
    assert judged(lambda: Words(rate=0.1, drawn_twice=True), sentences(), word_loss).equal is False


class Odd(Words):
    """A language model that does one thing otherwise where it is spread."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_wrong = {name: is_spread(self.words.weight) and self.mistake == name for name in ODD}
        hidden = self.words(x)
        hidden = hidden.detach() + 0 * hidden if is_wrong["embedding without a gradient"] else hidden
        attended = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = hidden + attended * (1.01 if is_wrong["attention scaled by 1.01"] else 1)
        hidden = F.layer_norm(
            hidden, (16,), self.norm.weight, self.norm.bias, eps=1e-3 if is_wrong["another eps"] else 1e-5
        )
        inner = F.gelu(self.mix(hidden), approximate="tanh" if is_wrong["another gelu"] else "none")
        if is_wrong["gradient halved"]:
            inner = (inner + inner.detach()) / 2
        if is_wrong["computed in bfloat16"]:
            return self.head(inner.bfloat16().float())
        return self.head(inner)


ODD = (
    "embedding without a gradient",
    "attention scaled by 1.01",
    "another eps",
    "another gelu",
    "gradient halved",
    "computed in bfloat16",
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mistake", ODD)
@pytest.mark.parametrize("optimizer_fn", [sgd, adamw])
def test_a_model_that_computes_something_else_is_found(mistake: str, optimizer_fn: Any):
    run = judged(lambda: Odd(mistake), sentences(), word_loss, optimizer_fn=optimizer_fn)
    assert run.equal is False, run.verdict


class OtherNorm(nn.Module):
    """Batch norm with something wrong in its statistics."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        is_wrong = is_spread(x)
        self.norm.momentum = 0.11 if is_wrong and self.mistake == "momentum" else 0.1
        if is_wrong and self.mistake == "half of the batch":
            half = x.shape[0] // 2
            x = torch.cat([self.norm(x[:half]), self.norm(x[half:])])
        else:
            x = self.norm(x)
        return self.head(F.relu(x).mean((2, 3)))


@pytest.mark.parametrize("mistake", ["momentum", "half of the batch"])
def test_batch_norm_with_other_statistics_is_found(mistake: str):
    assert judged(lambda: OtherNorm(mistake), images(), F.cross_entropy).equal is False


class StopsAt(torch.optim.SGD):
    """Leaves out one step where parameters are spread."""

    skipped = 5

    def step(self, closure: Any = None) -> Any:
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == self.skipped and is_spread(self.param_groups[0]["params"][0]):
            return None
        return super().step(closure)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["words", "images"])
def test_a_step_that_is_left_out_later_is_found(kind: str):
    model_fn, data, loss = (Words, sentences(), word_loss) if kind == "words" else (resnet, images(), F.cross_entropy)
    run = judged(model_fn, data, loss, optimizer_fn=lambda parameters: StopsAt(parameters, lr=0.1, momentum=0.9))
    assert run.equal is False, run.verdict


@wb.register_rule("b D -> b D")
def centred(x: torch.Tensor) -> torch.Tensor:
    """A rule that is wrong: rows are not independent."""
    return x - x.mean(0)


def test_a_rule_that_is_wrong_is_found():
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(centred(self.fc(x)).tanh())

    run = judged(Centred, features(), F.cross_entropy)
    assert run.equal is False and "differs by" in run.verdict.text


def test_mistakes_in_the_numbers_of_steps_are_told():
    with pytest.raises(RunError, match="steps=0"):
        Subject.of(mlp, features(), F.cross_entropy, batch_size=8, steps=0)
