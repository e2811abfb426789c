"""The panel without a browser and without engines: clicks in, state and widgets out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from tests.ui.conftest import make_record
from workbench.core.metrics import RunRecord, StepMetrics
from workbench.core.strategy import Layer, Strategy
from workbench.errors import StrategyError
from workbench.theme import DARK
from workbench.ui.trainer import sample_shape_of
from workbench.ui.widgets import Panel

LAYERS = [
    Layer("fc1", "Linear", {"weight": (256, 64), "bias": (256,)}, 16640),
    Layer("fc2", "Linear", {"weight": (10, 256), "bias": (10,)}, 2570),
]


class FakeRun:
    """A run that goes on until the test ends it or somebody stops it."""

    one_device_losses = (2.0, 1.5, 1.0)

    def __init__(self, name: str, strategy: Strategy, num_steps: int) -> None:
        self.name, self.strategy, self.num_steps = name, strategy, num_steps
        self.ended = threading.Event()
        self.stopped = False
        self.error: Exception | None = None
        self.waiting = [
            StepMetrics(
                rank, step, num_steps, 0.01, 128, loss=2.0 - step, memory_bytes={"parameters": 1000, "peak": 2000}
            )
            for step in range(2)
            for rank in range(2)
        ]

    def poll(self) -> list[StepMetrics]:
        taken, self.waiting = self.waiting, []
        return taken

    def done(self) -> bool:
        return self.ended.is_set()

    def stop(self) -> None:
        self.stopped = True
        self.ended.set()

    def result(self) -> RunRecord:
        if self.error is not None:
            raise self.error
        return make_record(self.name, strategy=str(self.strategy))


class FakeTrainer:
    """Two layers on two ranks."""

    def __init__(self) -> None:
        self.layers, self.num_ranks, self.sample_shape = LAYERS, 2, (64,)
        self.baseline: RunRecord | None = None
        self.runs: list[FakeRun] = []

    def start(self, strategy: Strategy, name: str, num_steps: int) -> FakeRun:
        self.baseline = make_record("one device", num_ranks=1)
        self.runs.append(FakeRun(name, strategy, num_steps))
        return self.runs[-1]


def make_mlp() -> None:
    """Only its name is shown."""


@pytest.fixture
def trainer() -> FakeTrainer:
    return FakeTrainer()


@pytest.fixture
def panel(trainer: FakeTrainer) -> Panel:
    return Panel(None, make_mlp, None, None, steps=3, trainer=trainer)


def finish(panel: Panel, trainer: FakeTrainer, error: Exception | None = None) -> None:
    """Let the current run end and wait until the panel has shown it."""
    trainer.runs[-1].error = error
    trainer.runs[-1].ended.set()
    assert panel.wait(10)


def grid_row(panel: Panel, name: str) -> dict[str, Any]:
    return next(row for row in panel.grid.view["rows"] if row["name"] == name)


def say(panel: Panel, **event: object) -> None:
    """What the grid's script would send."""
    panel.grid._handle_custom_msg(event, [])


def test_the_grid_shows_the_strategy(panel: Panel):
    assert [row["name"] for row in panel.grid.view["rows"]] == ["fc1", "fc2"]
    assert panel.controls.text.value == "*: data"
    assert not panel.controls.run.disabled
    assert "wb-panel" in panel._dom_classes


def test_a_click_in_the_grid_changes_everything_at_once(panel: Panel):
    say(panel, event="parallel", layers=["fc2"], value="model")
    assert panel.controls.text.value == "*: data; fc2: model"
    assert grid_row(panel, "fc2")["parallel"] == "model" and grid_row(panel, "fc2")["sbp"] == "S(0)"
    assert [panel.controls.degrees[name].value for name in ("pipeline", "data", "model")] == [1, 1, 2]
    assert panel.controls.presets["data"].description == "data, edited"
    assert str(panel.strategy) == "*: data; fc2: model"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "stage", "layers": ["fc2"], "value": 1}, "*: data; fc2: data@1"),
        ({"event": "split", "layers": ["fc2"]}, "*: data; fc2: model:column"),
        ({"event": "parallel", "layers": ["fc1", "fc2"], "value": "model"}, "*: data; fc1: model; fc2: model"),
    ],
)
def test_events_of_the_grid(panel: Panel, event: dict[str, Any], text: str):
    say(panel, **event)
    assert panel.controls.text.value == text
    say(panel, event="undo")
    assert panel.controls.text.value == "*: data"
    say(panel, event="redo")
    assert panel.controls.text.value == text


def test_unknown_events_are_ignored(panel: Panel):
    say(panel, event="format the disk")
    assert panel.controls.text.value == "*: data"


def test_presets_undo_and_redo_are_buttons(panel: Panel):
    assert panel.controls.undo.disabled and panel.controls.redo.disabled
    panel.controls.presets["model"].click()
    assert panel.controls.text.value == "*: model" and "wb-on" in panel.controls.presets["model"]._dom_classes
    panel.controls.undo.click()
    assert panel.controls.text.value == "*: data" and not panel.controls.redo.disabled


def test_degrees_micro_batches_and_schedule(panel: Panel):
    panel.controls.presets["pipeline"].click()
    panel.controls.micro_batches.value = 8
    panel.controls.schedule.value = "gpipe"
    assert panel.controls.text.value.endswith("| 2x1x1 mb=8 gpipe")
    panel.controls.degrees["data"].value = 2
    assert "= 4, but 2 ranks" in panel.controls.sum.value and panel.controls.run.disabled


def test_text_is_taken_when_it_parses(panel: Panel):
    panel.controls.text.value = "fc1: data; fc2: model"
    assert grid_row(panel, "fc2")["parallel"] == "model"
    panel.controls.text.value = "fc1: dta <b>"
    assert panel.controls.text.value == "fc1: dta <b>", "what the user typed is not taken away"
    assert "&lt;b&gt;" in panel.controls.mistakes.value and panel.controls.run.disabled
    assert "1 problem" in panel.controls.problems.value


def test_a_mistake_disables_run_and_offers_its_fix(panel: Panel, trainer: FakeTrainer):
    panel.controls.presets["pipeline"].click()
    say(panel, event="stage", layers=["fc1"], value=1)
    say(panel, event="stage", layers=["fc2"], value=0)
    row = grid_row(panel, "fc2")
    assert row["bad"] == "stage" and row["mistakes"]
    assert panel.controls.run.disabled and "fix" in panel.controls.run.tooltip
    say(panel, event="run")
    assert not trainer.runs, "nothing runs with a mistake"
    with pytest.raises(StrategyError, match="fc2"):
        panel.run()
    say(panel, event="fix", layer="fc2", value=row["mistakes"][0]["fixes"][0]["value"])
    assert not grid_row(panel, "fc2")["mistakes"]


def test_a_run_returns_at_once_and_is_followed(panel: Panel, trainer: FakeTrainer):
    panel.controls.run.click()
    assert panel.running and panel.controls.run.disabled and not panel.live.stop.disabled
    assert trainer.runs[0].num_steps == 3 and str(trainer.runs[0].strategy) == "*: data"
    assert not panel.wait(0.3), "it goes on"
    assert len(panel.live.figure.data[0].x) == 2, "points are drawn while it runs"
    assert "step 2 of 3" in panel.live.state.value and panel.live.progress.value == 2
    finish(panel, trainer)
    assert not panel.running and not panel.controls.run.disabled and panel.live.stop.disabled
    assert "finished" in panel.live.state.value
    assert list(panel.live.figure.data[0].y) == pytest.approx([10000, 5000, 4000]), "now every step"
    assert list(panel.live.figure.data[1].y) == [2.0, 1.5, 1.0], "one device behind"


def test_finished_runs_are_compared(panel: Panel, trainer: FakeTrainer):
    for _ in range(2):
        panel.run()
        finish(panel, trainer)
    assert [run.name for run in panel.runs] == ["data", "data (2)"]
    assert panel.baseline is not None and panel.baseline.name == "one device"
    assert "data (2)" in panel.comparison.value and "\u2713 2e-7" in panel.comparison.value
    assert repr(panel) == "<Panel '*: data': 2 finished runs>"


def test_one_run_at_a_time(panel: Panel, trainer: FakeTrainer):
    panel.run()
    with pytest.raises(RuntimeError, match="a run holds the engines"):
        panel.run()
    say(panel, event="run")
    assert len(trainer.runs) == 1
    finish(panel, trainer)


def test_stop(panel: Panel, trainer: FakeTrainer):
    panel.stop()
    panel.run(steps=500)
    panel.live.stop.click()
    assert panel.wait(10) and trainer.runs[0].stopped
    assert "stopped" in panel.live.state.value and "after 3 steps" in panel.live.state.value


def test_a_failed_run_says_why_and_the_next_one_works(panel: Panel, trainer: FakeTrainer):
    panel.run()
    finish(panel, trainer, RuntimeError("rank 1: <out of memory>"))
    assert "failed" in panel.live.state.value and "&lt;out of memory&gt;" in panel.live.failure.value
    assert not panel.runs and not panel.controls.run.disabled
    panel.run()
    finish(panel, trainer)
    assert len(panel.runs) == 1 and not panel.live.failure.value


def test_the_strategy_can_be_edited_while_a_run_goes_on(panel: Panel, trainer: FakeTrainer):
    panel.run()
    say(panel, event="parallel", layers=["fc2"], value="model")
    assert panel.controls.text.value == "*: data; fc2: model" and panel.controls.run.disabled
    finish(panel, trainer)
    assert panel.runs[0].strategy == "*: data"


def test_figures_follow_the_page_s_theme(panel: Panel, trainer: FakeTrainer):
    say(panel, event="theme", value="dark")
    panel.run()
    finish(panel, trainer)
    assert panel.live.figure.layout.font.color == DARK.ink
    say(panel, event="theme", value="light")
    assert panel.live.figure.layout.font.color != DARK.ink


def test_there_is_one_figure_widget_however_many_runs(panel: Panel, trainer: FakeTrainer):
    panel.run()
    finish(panel, trainer)
    first = panel.live.figure
    panel.run()
    finish(panel, trainer)
    assert panel.live.figure is first


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """An IPython that displays, and that leaves no history behind."""
    config = Config()
    config.HistoryManager.enabled = False
    yield InteractiveShell.instance(config=config)
    InteractiveShell.clear_instance()


def test_a_copy_without_widgets_is_displayed_too(panel: Panel, shell: InteractiveShell):
    with capture_output() as captured:
        panel._ipython_display_()
    widget, page, figure = (output.data for output in captured.outputs)
    assert "application/vnd.jupyter.widget-view+json" in widget
    assert "wb-static" in page["text/html"] and "fc1" in page["text/html"]
    assert page["text/plain"] == "Strategy: *: data"
    assert figure["text/html"] == ""


@pytest.mark.parametrize("shape", [(64,), (3, 8, 8)])
def test_sample_shape_of_every_kind_of_data(shape: tuple[int, ...]):
    import torch

    inputs, targets = torch.zeros(5, *shape), torch.zeros(5)
    assert sample_shape_of((inputs, targets)) == shape
    assert sample_shape_of((inputs.numpy(), targets.numpy())) == shape
    assert sample_shape_of(torch.utils.data.TensorDataset(inputs, targets)) == shape
    assert sample_shape_of([(inputs[0], 1)]) == shape
