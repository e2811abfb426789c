"""What a run reports, with round numbers, and a run that reports what a test wants."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tests.ui.conftest import make_record
from workbench.core.metrics import ActionSpan, RunEvent, RunRecord, StepBlock, StepSpans
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy

LAYERS = [
    Layer("fc1", "Linear", {"weight": (32, 64), "bias": (32,)}, 2080, calls=(1, 1)),
    Layer("fc2", "Linear", {"weight": (10, 32), "bias": (10,)}, 330, calls=(2, 2)),
]


def block(
    first_step: int = 0,
    losses: Sequence[float | None] = (2.0,),
    *,
    time_s: Sequence[float] = (0.1, 0.2),
    boxing_s: Sequence[float] = (0.05, 0.04),
    memory: Sequence[dict[str, int]] = (),
    num_steps: int = 10,
    samples: int = 100,
    sent: int = 500,
) -> StepBlock:
    """Steps that all take the same; ``time_s`` and ``boxing_s`` are by rank."""
    count = len(losses)
    return StepBlock(
        first_step,
        (samples,) * count,
        tuple(losses),
        tuple((time,) * count for time in time_s),
        tuple((time,) * count for time in boxing_s),
        tuple((sent,) * count for _ in time_s),
        tuple(memory),
        num_steps,
    )


def spans(rank: int, step: int = 0, stage: int | None = None) -> StepSpans:
    """F0, B0 and an optimizer's step of a pipeline of two stages, seconds from 10 on; each boxes its last quarter."""
    stage = rank if stage is None else stage
    start = 10.0 + stage
    actions = [("F", start, 1.0), ("B", 14.0 - 2 * stage, 2.0), ("O", 16.0, 0.5)]
    return StepSpans(
        rank,
        step,
        tuple(ActionSpan(kind, stage, 0, at, at + length, length / 4, 2, 1000) for kind, at, length in actions),
    )


def make_mlp() -> None:
    """Only its name is shown."""


class FakeRun:
    """A run that reports what it was given and goes on until the test ends it or somebody stops it."""

    one_device_losses: Sequence[float] | None = (2.0, 1.5, 1.0)

    def __init__(self, name: str = "data", strategy: object = "*: data", messages: Sequence[object] = ()) -> None:
        self.name, self.strategy = name, strategy
        self.waiting = list(messages)
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.commands: list[str] = []
        self.settings: dict[str, object] = {}

    def poll(self) -> list[object]:
        return [self.waiting.pop(0) for _ in range(len(self.waiting))]  # a test may add to the list meanwhile

    def done(self) -> bool:
        return self.ended.is_set()

    def stop(self) -> None:
        self.commands.append("stop")
        self.ended.set()

    def interrupt(self) -> None:
        self.commands.append("interrupt")
        self.ended.set()

    def pause(self) -> None:
        self.commands.append("pause")
        self.waiting.append(RunEvent("paused", 1))

    def resume(self) -> None:
        self.commands.append("resume")
        self.waiting.append(RunEvent("running", 1))

    def profile(self) -> None:
        self.commands.append("profile")

    def change(self, strategy: Strategy, name: str = "", predicted: object = None) -> None:
        self.later = name, predicted
        self.commands.append(f"strategy {strategy}")
        self.waiting.append(RunEvent("strategy", 1, str(strategy), 0.25, 1000))

    def result(self) -> RunRecord:
        if self.error is not None:
            raise self.error
        return make_record(self.name, strategy=str(self.strategy), settings=self.settings)


class FakeTrainer:
    """Two layers on two ranks."""

    def __init__(self) -> None:
        self.layers, self.num_ranks, self.sample_shape = LAYERS, 2, (64,)
        self.baseline: RunRecord | None = None
        self.check_steps, self.compiles, self.seed = 20, False, 0
        self.settings: dict[str, object] = {}  # of the task: a run of any other is refused
        self.seeds: list[int | None] = []
        self.runs: list[FakeRun] = []
        self.predicted: list[object] = []

    def start(
        self, strategy: Strategy, name: str, num_steps: int, predicted: object = None, seed: int | None = None
    ) -> FakeRun:
        self.baseline = make_record("one device", num_ranks=1)
        self.seeds.append(seed)
        memory = ({"parameters": 1000, "peak": 2000},) * 2
        first = block(0, (2.0, 1.0), memory=memory, num_steps=num_steps)
        self.runs.append(FakeRun(name, strategy, [first, spans(0), spans(1)]))
        self.predicted.append(predicted)
        return self.runs[-1]
