"""The panel without a browser and without engines: clicks in, state and widgets out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from tests.timeouts import WAIT_TIMEOUT_S, wait_until
from tests.ui.models import GPT_HYBRID, gpt
from tests.ui.reports import FakeTrainer, make_mlp
from workbench.core.strategy import Strategy
from workbench.cost.hardware import Hardware
from workbench.cost.hardware_files import load_hardware
from workbench.errors import HardwareError, NotStartedError, SessionError, StrategyError
from workbench.session.planning import first_batch
from workbench.theme import DARK
from workbench.ui import panel as panel_module
from workbench.ui.panel import Panel
from workbench.ui.planning.predictor import Predictor
from workbench.ui.strategy_editor import StrategyEditor, facts_of
from workbench.units import format_bytes


def finish(panel: Panel, trainer: FakeTrainer, error: Exception | None = None) -> None:
    """Let the current run end and wait until the panel has shown it."""
    trainer.runs[-1].error = error
    trainer.runs[-1].ended.set()
    assert panel.wait(WAIT_TIMEOUT_S)


def editor(panel: Panel) -> StrategyEditor:
    return panel._editor


def grid_row(panel: Panel, pattern: str) -> dict[str, Any]:
    return next(row for row in editor(panel).grid.view["rows"] if row["pattern"] == pattern)


def say(panel: Panel, **event: object) -> None:
    """What the grid's script would send."""
    editor(panel).grid._handle_custom_msg(event, [])


def test_the_grid_shows_the_strategy(panel: Panel):
    assert [row["pattern"] for row in editor(panel).grid.view["rows"]] == ["fc1", "fc2"]
    controls = editor(panel).controls
    assert controls.text.value == "*: data"
    assert not controls.run.disabled
    assert "wb-panel" in panel._dom_classes


def test_a_click_in_the_grid_changes_everything_at_once(panel: Panel):
    say(panel, event="choice", rows=["fc2"], value="model")
    controls = editor(panel).controls
    assert controls.text.value == "*: data; fc2: model"
    assert grid_row(panel, "fc2")["parallel"] == "model" and grid_row(panel, "fc2")["sbp"] == "S(0)"
    assert [controls.degrees[name].value for name in ("pipeline", "data", "model")] == [1, 1, 2]
    assert controls.presets["data"].description == "data, edited"
    assert str(panel.strategy) == "*: data; fc2: model"


def test_a_run_shows_what_memory_the_machine_of_predictions_has(trainer: FakeTrainer):
    machine = load_hardware("h200")
    panel = Panel(make_mlp, None, None, steps=3, trainer=trainer, keep=False, hardware=machine)
    panel.run()
    finish(panel, trainer)
    limits = [note.text for note in panel._runs_section.live.shown.figure.layout.annotations if note.name == "limit"]
    assert limits == [f"h200: {format_bytes(machine.memory_bytes)} \u2192"]


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "stage", "rows": ["fc2"], "value": 1}, "*: data; fc2: data@1"),
        ({"event": "choice", "rows": ["fc2"], "value": "model:column"}, "*: data; fc2: model:column"),
        ({"event": "choice", "rows": ["fc1", "fc2"], "value": "model"}, "*: model"),
    ],
)
def test_events_of_the_grid(panel: Panel, event: dict[str, Any], text: str):
    controls = editor(panel).controls
    say(panel, **event)
    assert controls.text.value == text
    say(panel, event="undo")
    assert controls.text.value == "*: data"
    say(panel, event="redo")
    assert controls.text.value == text


def test_unknown_events_are_ignored(panel: Panel):
    say(panel, event="format the disk")
    assert editor(panel).controls.text.value == "*: data"


def test_presets_undo_and_redo_are_buttons(panel: Panel):
    controls = editor(panel).controls
    assert controls.undo.disabled and controls.redo.disabled
    controls.presets["model"].click()
    assert controls.text.value == "*: model" and "wb-on" in controls.presets["model"]._dom_classes
    controls.undo.click()
    assert controls.text.value == "*: data" and not controls.redo.disabled


def test_degrees_micro_batches_and_schedule(panel: Panel):
    controls = editor(panel).controls
    controls.presets["pipeline"].click()
    controls.micro_batches.value = 8
    controls.schedule.value = "gpipe"
    assert controls.text.value.endswith("| 2x1x1 mb=8 gpipe")
    controls.degrees["data"].value = 2
    assert "= 4 ranks, but there are 2" in controls.sum.value and controls.run.disabled


def test_options_of_the_whole_model(panel: Panel):
    controls = editor(panel).controls
    controls.zero.value = 2
    controls.context.value = 2
    controls.recompute.value = "full"
    controls.offload.value = "optimizer"
    controls.sequence.value = True
    controls.overlap.value = 4
    controls.precision.value = "bf16"
    assert controls.text.value == "*: data | zero=2 context=2 recompute offload=optimizer sequence overlap=4 bf16"
    assert "overlap=4, but 0 of" in controls.mistakes.value
    controls.undo.click()
    assert controls.precision.value == "fp32" and controls.zero.value == 2
    controls.shards.value = 3
    assert "zero=2 shards=3 context=2" in controls.text.value
    assert "shards=3, but a data degree of 2" in controls.mistakes.value
    controls.undo.click()
    assert controls.shards.value == 0 and "shards" not in controls.text.value
    controls.offload.value = "optimizer+activations"
    assert "offload=optimizer+activations" in controls.text.value
    controls.undo.click()
    controls.offload.value = ""
    assert "offload" not in controls.text.value
    controls.undo.click()
    assert controls.offload.value == "optimizer"


def test_text_is_taken_when_it_parses_and_underlined_where_it_does_not(panel: Panel):
    controls = editor(panel).controls
    controls.text.value = "fc1: data; fc2: model"
    assert grid_row(panel, "fc2")["parallel"] == "model"
    controls.text.value = "fc1: dta <b>; fc2: model"
    assert controls.text.value == "fc1: dta <b>; fc2: model", "what the user typed is not taken away"
    assert "&lt;b&gt;" in controls.mistakes.value and controls.run.disabled
    assert '<span class="wrong">fc1: dta &lt;b&gt;</span>' in controls.pieces.value
    assert '<span class="">fc2: model</span>' in controls.pieces.value
    assert "1 problem<" in controls.problems.value


def test_a_mistake_disables_run_and_offers_its_fix(panel: Panel, trainer: FakeTrainer):
    controls = editor(panel).controls
    controls.presets["pipeline"].click()
    say(panel, event="stage", rows=["fc1"], value=1)
    say(panel, event="stage", rows=["fc2"], value=0)
    row = grid_row(panel, "fc2")
    assert row["bad"] == "stage" and row["mistakes"]
    assert controls.run.disabled and "fix" in controls.run.tooltip
    assert '<span class="wrong">fc2: data@0</span>' in controls.pieces.value
    say(panel, event="run")
    assert not trainer.runs, "nothing runs with a mistake"
    with pytest.raises(StrategyError, match="fc2"):
        panel.run()
    say(panel, event="fix", row="fc2", value=row["mistakes"][0]["fixes"][0]["value"])
    assert not grid_row(panel, "fc2")["mistakes"]


def test_mistakes_of_no_row_have_their_fixes_above_the_grid(panel: Panel):
    controls = editor(panel).controls
    controls.degrees["data"].value = 3
    assert 'data-fix="use 1x2x1"' in controls.mistakes.value
    say(panel, event="fix", row=None, value="use 1x2x1")
    assert controls.mistakes.value == "" and not controls.run.disabled


def test_a_pipeline_of_one_micro_batch_is_said_with_a_way_out(panel: Panel):
    controls = editor(panel).controls
    assert controls.mistakes.value == ""
    controls.presets["pipeline"].click()
    controls.micro_batches.value = 1
    assert "the 2 stages work one after another" in controls.mistakes.value and not controls.run.disabled
    assert 'data-fix="use mb=4"' in controls.mistakes.value
    say(panel, event="fix", row=None, value="use mb=4")
    assert controls.micro_batches.value == 4 and controls.mistakes.value == ""


def test_a_run_is_followed_and_compared(panel: Panel, trainer: FakeTrainer):
    for _ in range(2):
        editor(panel).controls.run.click()
        assert panel.running and editor(panel).controls.run.disabled
        say(panel, event="run")
        finish(panel, trainer)
    assert [run.name for run in panel.runs] == ["data", "data (2)"] and len(trainer.runs) == 2
    assert panel.baseline is not None and panel.baseline.name == "one device"
    assert not panel.running and not editor(panel).controls.run.disabled
    assert repr(panel) == "<Panel '*: data': 2 finished runs>"


def test_the_strategy_can_be_edited_while_a_run_goes_on(panel: Panel, trainer: FakeTrainer):
    panel.run()
    say(panel, event="choice", rows=["fc2"], value="model")
    assert editor(panel).controls.text.value == "*: data; fc2: model" and editor(panel).controls.run.disabled
    finish(panel, trainer)
    assert panel.runs[0].strategy == "*: data"


def test_a_page_that_shows_the_panel_has_the_figure_before_the_first_run(panel: Panel, trainer: FakeTrainer):
    live = panel._runs_section.live
    assert live.shown is None, "nobody has seen the panel yet"
    say(panel, event="theme", value="light")
    wait_until(lambda: live.shown is not None)
    assert not live.box.children
    shown = live.shown
    panel.run()
    assert live.shown is shown and shown in live.box.children
    finish(panel, trainer)


def test_a_panel_without_engines_makes_no_figure(monkeypatch: pytest.MonkeyPatch, panel: Panel):
    made: list[Panel] = []
    without = Panel(make_mlp, (32, 64), num_ranks=2, costs=gpt(1))
    for each in (without, panel):
        monkeypatch.setattr(each._runs_section.live, "prepare", lambda each=each: made.append(each))
        say(each, event="theme", value="dark")
    assert made == [panel]  # 5 MB for nothing, else


def test_figures_follow_the_page_s_theme(panel: Panel, trainer: FakeTrainer):
    say(panel, event="theme", value="dark")
    panel.run()
    finish(panel, trainer)
    assert panel._runs_section.live.shown.figure.layout.font.color == DARK.ink
    say(panel, event="theme", value="light")
    assert panel._runs_section.live.shown.figure.layout.font.color != DARK.ink


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
    widget, page = (output.data for output in captured.outputs)
    assert "application/vnd.jupyter.widget-view+json" in widget
    assert widget["text/plain"] == "", "no words that would soon be wrong"
    assert "wb-static" in page["text/html"] and "fc1" in page["text/html"]
    assert page["text/plain"].splitlines()[0] == "Strategy: *: data"


@pytest.mark.parametrize("shape", [(64,), (3, 8, 8)])
def test_sample_shape_of_every_kind_of_data(shape: tuple[int, ...]):
    inputs, targets = torch.zeros(5, *shape), torch.zeros(5)
    columns, samples = {"x": inputs, "label": targets}, [{"x": inputs[0].numpy(), "label": 1}]
    pairs = [(inputs, targets), (inputs.numpy(), targets.numpy()), torch.utils.data.TensorDataset(inputs, targets)]
    for dataset in (*pairs, [(inputs[0], 1)], columns, samples):
        assert first_batch(dataset, torch.nn.functional.cross_entropy).sample_shape == shape


# ---- no cluster at all -----------------------------------------------------------------------------------------------


@pytest.fixture
def offline_panel() -> Panel:
    return Panel(make_mlp, (32, 64), strategy=GPT_HYBRID, batch_size=32, hardware="v100-dgx1", num_ranks=4, costs=gpt())


def test_an_offline_panel_predicts_and_does_not_run(offline_panel: Panel):
    html = editor(offline_panel).predictions.value
    assert "Predicted step time" in html and "before the last change" not in html
    assert editor(offline_panel).controls.run.disabled
    with pytest.raises(SessionError, match="no engines"):
        offline_panel.run()
    estimate = offline_panel.estimate()
    assert estimate is not None and estimate.step_s > 0 and len(estimate.memory) == 2


def test_a_toggle_changes_the_prediction_and_shows_the_one_before(offline_panel: Panel):
    first = offline_panel.estimate()
    say(offline_panel, event="choice", rows=["blocks.[0-3]"], value="data")
    second = offline_panel.estimate()
    assert first is not None and second is not None and first.step_s != second.step_s
    assert "before the last change" in editor(offline_panel).predictions.value


def test_with_a_mistake_predictions_stay_as_they_were(offline_panel: Panel):
    before = offline_panel.estimate()
    say(offline_panel, event="stage", rows=["lm_head"], value=0)
    assert 'class="wb-predictions old"' in editor(offline_panel).predictions.value
    assert offline_panel.estimate() == before


def test_rows_unfold_and_layers_are_found(offline_panel: Panel):
    say(offline_panel, event="fold", rows=["blocks.[0-3]"])
    assert grid_row(offline_panel, "blocks.[0-3].attn.qkv")["depth"] == 1
    say(offline_panel, event="find", value="lm_*")
    assert [row["pattern"] for row in editor(offline_panel).grid.view["rows"]] == ["lm_head"]


def test_the_tensors_of_the_selected_row_are_drawn(offline_panel: Panel):
    say(offline_panel, event="tensor")
    say(offline_panel, event="select", rows=["lm_head"])
    html = editor(offline_panel).tensor.value
    assert "lm_head.weight" in html and "rank 3" in html and "what enters lm_head" in html
    say(offline_panel, event="tensor")
    assert editor(offline_panel).tensor.value == ""


def test_without_a_machine_the_panel_says_how_to_get_one(panel: Panel):
    assert "wb.planner.calibrate(session)" in editor(panel).predictions.value
    assert editor(panel).controls.planned.disabled
    assert "machine" in editor(panel).controls.planned.tooltip


def test_a_panel_with_engines_offers_to_measure_the_machine(trainer: FakeTrainer):
    predictor = Predictor(None, 32)
    predictor.costs = gpt(1)
    measured = threading.Event()

    def calibrate() -> Hardware:
        assert measured.wait(WAIT_TIMEOUT_S)
        return load_hardware("v100-dgx1")

    facts = facts_of(gpt(1).layers, 32, (64,), None)
    part = StrategyEditor(
        gpt(1).layers, 2, None, facts, predictor, title="gpt", on_run=lambda: None, calibrate=calibrate
    )
    assert part.measure.layout.display == "" and not part.measure.disabled
    part.measure.click()
    assert part.measure.disabled and "Measuring" in part.measure.description
    measured.set()
    wait_until(lambda: part.measure.layout.display == "none")
    assert "Predicted step time" in part.predictions.value


def test_bad_arguments_are_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(HardwareError, match="no-such-machine"):
        Panel(make_mlp, (32, 64), costs=gpt(1), num_ranks=2, hardware="no-such-machine")
    monkeypatch.setattr(panel_module, "find_current", lambda: None)
    with pytest.raises(NotStartedError, match=r"no engines are running.*num_ranks=2"):
        Panel(make_mlp, (32, 64), costs=gpt(1))
    engines: Any = SimpleNamespace(num_engines=3)
    with pytest.raises(ValueError, match=r"num_ranks=2\).*3 engines"):
        Panel(make_mlp, (32, 64), session=engines, num_ranks=2)


@pytest.mark.parametrize("first", [None, SimpleNamespace()])
def test_a_session_before_the_model_is_a_mistake_with_its_fix(first: Any):
    with pytest.raises(ValueError, match=r"is the function that makes the model\. Write wb\.Panel\("):
        Panel(first, make_mlp, (32, 64), costs=gpt(1), num_ranks=2)  # type: ignore[arg-type]


def test_a_real_model_is_counted_on_metadata():
    from torch import nn
    from torch.nn.functional import cross_entropy

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    data = torch.zeros(100, 64), torch.zeros(100, dtype=torch.long)
    panel = Panel(make_model, data, cross_entropy, hardware="h200", num_ranks=2, strategy="model")
    rows = editor(panel).grid.view["rows"]
    assert [(row["label"], row["boxings"]["layout"]) for row in rows] == [("0", "S(1)"), ("2", "P")]
    assert editor(panel).grid.view["end"]["label"] == "cross_entropy"
    estimate = panel.estimate()
    assert estimate is not None and estimate.boxed_bytes > 0


@pytest.mark.slow
def test_a_model_with_its_own_loss_is_counted_on_metadata():

    from tests.models.zoo import batch_for, make

    costs = {}
    for way in ("dict", "tuple"):
        data = batch_for("gpt2") if way == "dict" else (batch_for("gpt2"), torch.zeros(5, dtype=torch.long))
        loss_fn = None if way == "dict" else lambda output, targets: output.loss + 0 * targets.sum()
        rows = {"transformer.h.*": "model"}
        panel = Panel(lambda: make("gpt2"), data, loss_fn, hardware="h200", num_ranks=2, strategy=rows)
        assert panel.strategy == Strategy(rows)
        costs[way] = panel.estimate()
    assert costs["dict"].compute_s == pytest.approx(costs["tuple"].compute_s, rel=0.05)
