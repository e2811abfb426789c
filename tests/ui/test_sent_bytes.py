"""The panel says what a step really sends, for models whose layers are no chain."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.cost.test_boxed_bytes import ONE_SHOT
from tests.timeouts import WAIT_TIMEOUT_S
from tests.ui.reports import FakeTrainer
from workbench.cost.estimate import SentBytes
from workbench.session.planning import CountEnded, SentCounter
from workbench.tensors.dispatch.fallback import FallbackWarning
from workbench.testing import run_ranks
from workbench.training.runs.job import Job
from workbench.training.runs.train import run_strategy
from workbench.ui.panel import Panel
from workbench.ui.planning import byte_counter, offline_trainer
from workbench.ui.planning.byte_counter import ByteCounter
from workbench.units import format_bytes

BATCH = 16
IMAGES = torch.randn(BATCH, 1, 8, 8)


@pytest.fixture(autouse=True)
def counts_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_counter, "_QUIET_S", 0.0)


class Denoiser(nn.Module):
    """A U-Net with an embedding of time: dict batches, a skip connection over all, tensors made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.stem, self.norm = nn.Linear(8, 16), nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down, self.shift = nn.Conv2d(4, 8, 3, padding=1, stride=2), nn.Linear(16, 8)
        self.up, self.fuse = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, image: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(4) * 0.5)
        time = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], -1)))
        first = F.silu(self.norm(self.stem(image)))
        inner = F.silu(self.down(first) + self.shift(time)[:, :, None, None])
        return self.fuse(torch.cat([self.up(inner), first], 1))


class Twice(nn.Module):
    """A residual, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + torch.tanh(self.inner(x))
        return self.head(x + torch.tanh(self.inner(x)))


class Tied(nn.Module):
    """Positions without a batch dim, and a head with the table's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(32, 16), nn.Embedding(8, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(8))
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.norm(x)).transpose(1, 2)


class TwoTowers(nn.Module):
    """Two encoders whose loss compares every sample with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Embedding(30, 16)
        self.mix, self.scale = nn.Linear(16, 16), nn.Parameter(torch.tensor(1.0))

    def forward(self, pixels: torch.Tensor, words: torch.Tensor) -> dict[str, torch.Tensor]:
        images = F.normalize(self.image(pixels), dim=-1)
        texts = F.normalize(self.mix(self.text(words).mean(1)), dim=-1)
        alike = self.scale.exp() * images @ texts.T
        return {"loss": F.cross_entropy(alike, torch.arange(len(alike)))}


WORDS = torch.arange(BATCH * 8).view(BATCH, 8) % 32
MODELS: dict[str, tuple[type[nn.Module], Any, Callable[..., Any] | None]] = {
    "denoiser": (Denoiser, {"image": IMAGES, "t": torch.rand(BATCH), "target": IMAGES}, F.mse_loss),
    "twice": (Twice, (torch.ones(BATCH, 12), torch.arange(BATCH) % 6), F.cross_entropy),
    "tied": (Tied, (WORDS, WORDS), F.cross_entropy),
    "towers": (TwoTowers, {"pixels": torch.ones(BATCH, 20), "words": WORDS % 30}, None),
}
STRATEGIES = {"pipeline": 2, "hybrid": 4, "model": 2, "data": 2, "data | zero=3": 2}
QUICK = {("denoiser", "hybrid"), ("towers", "data")}
CASES = [
    pytest.param(name, strategy, marks=() if (name, strategy) in QUICK else pytest.mark.slow)
    for name in MODELS
    for strategy in STRATEGIES
    if (name, strategy) != ("towers", "pipeline")  # its loss has no micro-batches
]


def panel_of(name: str, strategy: str) -> Panel:
    make, data, loss_fn = MODELS[name]
    return Panel(
        make, data, loss_fn, strategy=strategy, num_ranks=STRATEGIES[strategy], batch_size=BATCH,
        hardware=ONE_SHOT, keep=False,
    )  # fmt: skip


def counted(panel: Panel) -> str:
    """The panel's total, once it is shown and has counted."""
    panel._editor.is_shown = True
    panel._editor.refresh()
    assert panel._editor.bytes is not None
    panel._editor.bytes.wait(60)
    return panel._editor.grid.view["total"][0]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_the_panel_says_what_a_run_sends(name: str, strategy: str):
    panel = panel_of(name, strategy)
    job = Job(*MODELS[name], None, BATCH, 2)
    sent = sum(
        run.boxed_bytes for run in run_ranks(lambda: run_strategy(job, str(panel.strategy)), panel.state.num_ranks)
    )
    assert counted(panel) == format_bytes(sent)
    estimate = panel.estimate()
    assert estimate is not None and estimate.boxed_bytes == sent, "what a run is predicted to send"


def test_before_it_is_counted_the_panel_says_about_how_much():
    panel = panel_of("denoiser", "pipeline")
    total, parts = panel._editor.grid.view["total"]
    assert total.startswith("about ") and "beside the rows" in parts
    assert counted(panel) == total.removeprefix("about "), "in a pipeline the estimate is right"


def test_a_forward_that_reads_values_keeps_its_estimate():
    class Reads(Twice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum().item() > 0 else -x)

    data = MODELS["twice"][1]
    costs = offline_trainer.costs_of(Twice, data, F.cross_entropy)
    panel = Panel(Reads, data, F.cross_entropy, num_ranks=2, batch_size=BATCH, costs=costs, keep=False)
    assert counted(panel).startswith("about ")


def test_a_new_strategy_ends_the_count_of_the_one_before_and_a_run_ends_all():
    begun, ended, shown = threading.Event(), [], threading.Event()

    def count(strategy: str, num_ranks: int, is_ended: Callable[[], bool]) -> SentBytes:
        begun.set()
        while strategy != "*: model":
            if is_ended():
                ended.append(strategy)
                raise CountEnded
        return SentBytes(1.0, 2.0)

    counter = ByteCounter(count, shown.set)
    counter.ask("*: data", 2)
    assert begun.wait(10)
    counter.ask("*: model", 2)
    assert shown.wait(10) and ended == ["*: data"] and counter.known("*: model", 2) == SentBytes(1.0, 2.0)
    counter.ask("*: data", 2)
    counter.end()
    counter.wait(10)
    assert counter.known("*: data", 2) is None


def test_under_zero_3_the_bytes_of_weights_are_not_called_activations():
    """Two ranks gather 3 halves of the weights in a step and scatter a half of the gradients: none are activations."""
    panel = panel_of("twice", "data | zero=3")
    counted(panel)
    found = panel._editor._counted_bytes()
    weights = sum(4 * parameter.numel() for parameter in Twice().parameters())
    assert found is not None and found.activations == 0
    assert found.weights >= 3 * weights
    assert "0 B activations" in panel._editor.grid.view["total"][1]


class Slow:
    """A count that waits for its end, until it may finish; it remembers which strategies have ended."""

    def __init__(self) -> None:
        self.begun, self.ended, self.may_finish = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, strategy: str, num_ranks: int, is_ended: Callable[[], bool]) -> SentBytes:
        self.begun.set()
        while not self.may_finish.is_set():
            if is_ended():
                self.ended.set()
                raise CountEnded
        return SentBytes(1.0, 2.0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    count = Slow()
    monkeypatch.setattr(offline_trainer, "sent_counter", lambda *args: count)
    monkeypatch.setattr(byte_counter, "_QUIET_S", 0.01)
    return count


def shown(panel: Panel) -> ByteCounter:
    panel._editor.is_shown = True
    panel._editor.refresh()
    assert panel._editor.bytes is not None
    return panel._editor.bytes


def test_a_click_on_run_ends_the_count_and_it_comes_back_after_the_run(slow: Slow, trainer: FakeTrainer):
    panel = Panel(Twice, None, None, trainer=trainer, keep=False)
    counter = shown(panel)
    assert slow.begun.wait(WAIT_TIMEOUT_S) and not slow.ended.is_set()
    panel._editor.controls.run.click()
    assert slow.ended.wait(WAIT_TIMEOUT_S), "while the run is in progress"
    slow.may_finish.set()
    assert panel.running and counter.known("*: data", 2) is None
    trainer.runs[-1].ended.set()
    assert panel.wait(WAIT_TIMEOUT_S)
    counter.wait(WAIT_TIMEOUT_S)
    assert counter.known("*: data", 2) == SentBytes(1.0, 2.0)


def test_a_call_of_the_session_ends_the_count_too_and_closing_the_panel_for_good(slow: Slow, trainer: FakeTrainer):
    panel = Panel(Twice, None, None, trainer=trainer, keep=False)
    calls: list[str] = []
    panel._editor.has_calls = lambda: bool(calls)
    counter = shown(panel)
    assert slow.begun.wait(WAIT_TIMEOUT_S)
    calls.append("a cell")
    assert slow.ended.wait(WAIT_TIMEOUT_S)
    slow.begun.clear()
    calls.clear()
    assert slow.begun.wait(WAIT_TIMEOUT_S), "it begins again when the engines are free"
    panel.close()
    counter.wait(WAIT_TIMEOUT_S)
    assert counter.known("*: data", 2) is None


def test_a_strategy_that_never_was_valid_is_not_counted(slow: Slow, trainer: FakeTrainer):
    panel = Panel(Twice, None, None, strategy="*: data@7", trainer=trainer, keep=False)
    shown(panel).wait(WAIT_TIMEOUT_S)
    assert not slow.begun.is_set()


def test_the_static_copy_is_written_again_after_a_count(slow: Slow, trainer: FakeTrainer):
    panel = Panel(Twice, None, None, trainer=trainer, keep=False)
    written: list[bool] = []
    panel._editor._on_change = lambda: written.append(True)
    slow.may_finish.set()
    shown(panel).wait(WAIT_TIMEOUT_S)
    assert written


class Wave(torch.autograd.Function):
    """A function without a rule: it is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x - x.mean(0, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] - grads[0].mean(0, keepdim=True)


class Gathered(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(Wave.apply(self.stem(x)))


def test_a_count_warns_of_no_gathering(monkeypatch: pytest.MonkeyPatch):
    warned: list[Any] = []
    monkeypatch.setattr(warnings, "warn", lambda *args, **options: warned.append(args))
    SentCounter(Gathered, MODELS["twice"][1], F.cross_entropy, None, BATCH).count("*: data", 2, lambda: False)
    assert not [args for args in warned if FallbackWarning in args]


def test_a_count_keeps_no_data_and_rewinds_no_random_numbers(monkeypatch: pytest.MonkeyPatch):
    """A cell may draw some meanwhile."""
    rewound: list[Any] = []
    monkeypatch.setattr(torch, "set_rng_state", rewound.append)
    counter = SentCounter(Twice, MODELS["twice"][1], F.cross_entropy, None, BATCH)
    counter.count("*: data | 1x2x1 mb=2", 2, lambda: False)
    assert counter._batch is not None and counter._batch.inputs.is_meta and counter._batch.targets.is_meta
    assert not rewound


def test_a_count_ends_between_boxings_too():
    """On one rank there are none."""
    asked: list[int] = []

    def is_ended() -> bool:
        asked.append(1)
        return len(asked) > 3

    count = SentCounter(Twice, MODELS["twice"][1], F.cross_entropy, None, BATCH).count
    with pytest.raises(CountEnded):
        count("*: data", 1, is_ended)
