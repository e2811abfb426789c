"""Whatever fails in the panel is seen in the panel: every callback is broken once, and works again afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from tests.timeouts import WAIT_TIMEOUT_S, wait_until
from tests.ui.conftest import make_record
from tests.ui.reports import FakeRun, FakeTrainer, block, make_mlp
from workbench.core.metrics import RunEvent, RunRecord
from workbench.core.model_costs import Extent, LayerCost, ModelCosts
from workbench.core.strategy import Strategy
from workbench.cost.hardware_files import load_hardware
from workbench.errors import StrategyError
from workbench.session.comparison.checker import RunStopped
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.ui import panel as panel_module
from workbench.ui import strategy_editor
from workbench.ui.failures import Failures, failure_html, guarded
from workbench.ui.live.run_view import RunView
from workbench.ui.panel import Panel
from workbench.ui.planning import machine_bar
from workbench.ui.planning.predictor import Predictor
from workbench.ui.runs import runs_section
from workbench.ui.runs.runs_section import RunsSection
from workbench.ui.runs.runs_view import show_runs
from workbench.ui.runs.table_widget import RunTable
from workbench.ui.runs.trainer import _BackgroundRun
from workbench.ui.strategy.state import PanelState


class Broken(Exception):
    """What nobody has foreseen."""


@pytest.fixture
def panel(trainer: FakeTrainer) -> Panel:
    costs = ModelCosts(tuple(LayerCost(layer, output=Extent((8,))) for layer in trainer.layers), (64,))
    made = Panel(make_mlp, None, None, steps=3, trainer=trainer, keep=False, costs=costs, hardware="v100-dgx1")
    made._editor._calibrate = lambda: load_hardware("h200")
    return made


def say(panel: Panel, **event: object) -> None:
    panel._editor.grid._handle_custom_msg(event, [])


def tell_table(panel: Panel, **event: object) -> None:
    panel._runs_section.table.page._handle_custom_msg(event, [])


def run_once(panel: Panel) -> None:
    """A finished run, so that there is one to choose."""
    panel.run()
    panel._runs_section._poller.run.ended.set()  # type: ignore[union-attr]
    assert panel.wait(WAIT_TIMEOUT_S)
    panel._runs_section.table.selected = panel._runs_section.table.rows[0].key


def runs(panel: Panel) -> RunsSection:
    return panel._runs_section


def untouched(panel: Panel) -> None:
    """As it was made."""


def toggled(panel: Panel) -> None:
    say(panel, event="choice", rows=["fc2"], value="model")


def start(panel: Panel) -> None:
    panel.run()
    wait_until(lambda: runs(panel).live.history is not None and runs(panel).live.history.last_step > 0)  # type: ignore[union-attr]


def changing(panel: Panel) -> None:
    start(panel)
    runs(panel).change()


Target = tuple[Any, str]
CALLBACKS: list[tuple[str, Callable[[Panel], None], Target, Callable[[Panel], None]]] = [
    ("a toggle", untouched, (strategy_editor, "grid_view"),
     lambda p: say(p, event="choice", rows=["fc2"], value="model")),
    ("undo in the grid", untouched, (PanelState, "undo"), lambda p: say(p, event="undo")),
    ("a search", untouched, (PanelState, "look_for"), lambda p: say(p, event="find", value="fc1")),
    ("a selected row", untouched, (strategy_editor.StrategyEditor, "_show_tensor"),
     lambda p: say(p, event="select", rows=["fc1"])),
    ("the static copy", untouched, (panel_module, "static_html"), lambda p: p._copy._write_soon()),
    ("a preset", untouched, (strategy_editor, "grid_view"), lambda p: p._editor.controls.presets["model"].click()),
    ("undo", toggled, (strategy_editor, "grid_view"),
     lambda p: p._editor.controls.undo.click()),
    ("degrees", untouched, (PanelState, "set_degrees"),
     lambda p: setattr(p._editor.controls.degrees["model"], "value", 2)),
    ("an option", untouched, (PanelState, "set_options"), lambda p: setattr(p._editor.controls.zero, "value", 1)),
    ("a text", untouched, (strategy_editor, "grid_view"),
     lambda p: setattr(p._editor.controls.text, "value", "*: model")),
    ("the planner's button", untouched, (strategy_editor.PlannerSection, "ask"),
     lambda p: p._editor.controls.planned.click()),
    ("the planner's thread", untouched, (PanelState, "set_planned"),
     lambda p: p._editor.controls.planned.click()),
    ("another machine", untouched, (machine_bar, "load_hardware"),
     lambda p: setattr(p._editor.machine.machine, "value", "h200")),
    ("a slider of the machine", untouched, (Predictor, "predict"),
     lambda p: setattr(p._editor.machine.sliders["links"], "value", 2.0)),
    ("the ranks", untouched, (PanelState, "set_num_ranks"),
     lambda p: setattr(p._editor.machine.ranks, "value", 4)),
    ("measuring", untouched, (machine_bar.MachineBar, "adopt"), lambda p: p._editor.calibrate()),
    ("counting", untouched, (strategy_editor, "grid_view"), lambda p: p._counting.run()),
    ("Run", untouched, (strategy_editor.StrategyEditor, "wanted"), lambda p: p._editor.controls.run.click()),
    ("Pause", start, (FakeRun, "pause"), lambda p: runs(p).pause_button.click()),
    ("Stop", start, (FakeRun, "stop"), lambda p: runs(p).stop_button.click()),
    ("Change strategy", start, (FakeRun, "pause"), lambda p: runs(p).change_button.click()),
    ("Apply", start, (FakeRun, "change"), lambda p: runs(p).apply_button.click()),
    ("Keep", changing, (FakeRun, "resume"), lambda p: runs(p).keep_button.click()),
    ("the trace", run_once, (runs_section, "chrome_trace"), lambda p: runs(p).trace_button.click()),
    ("sorting", run_once, (RunTable, "sort_by"), lambda p: tell_table(p, event="sort", value="peak_bytes")),
    ("Open in panel", run_once, (strategy_editor.StrategyEditor, "open"), lambda p: runs(p).table.open_button.click()),
    ("Run again", run_once, (strategy_editor.StrategyEditor, "open"), lambda p: runs(p).table.again_button.click()),
    ("Hide", run_once, (RunTable, "refresh"), lambda p: runs(p).table.hide_button.click()),
    ("a baseline", run_once, (RunTable, "set_baseline"),
     lambda p: setattr(runs(p).table.baseline_field, "value", runs(p).table.baseline_field.options[1][1])),
    ("a filter", run_once, (RunTable, "refresh"),
     lambda p: setattr(runs(p).table.filter_field, "value", "memory < 300")),
    ("Load runs", run_once, (SavedRuns, "__iter__"), lambda p: runs(p).table.load_button.click()),
    ("the width", start, (RunView, "_redraw"),
     lambda p: runs(p).live.link._handle_custom_msg({"event": "width", "value": 700}, [])),
    ("the theme", start, (RunView, "_redraw"),
     lambda p: runs(p).live.link._handle_custom_msg({"event": "theme", "value": "dark"}, [])),
]  # fmt: skip


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(prepare, marks=() if prepare in (untouched, start, run_once) else pytest.mark.slow)
        for prepare in dict.fromkeys(case[1] for case in CALLBACKS)
    ],
    ids=lambda prepare: prepare.__name__,
)
def test_a_callback_that_fails_is_shown(panel: Panel, prepare: Callable[[Panel], None]):
    """One after the other in one panel, which goes on with what the one before has left."""
    strategy = str(panel.strategy)
    for name, before, target, act in CALLBACKS:
        if before is prepare:
            panel.load(strategy)
            prepare(panel)
            assert_shown(panel, name, target, act)
    run_once(panel)


def assert_shown(panel: Panel, name: str, target: Target, act: Callable[[Panel], None]) -> None:
    """The panel shows what has broken until the reader closes the box."""
    panel._copy._handle = FakePage()
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(*target, fail)
        act(panel)
        wait_until(lambda: panel._failures.error is not None, name)
    shown = panel._failures
    assert isinstance(shown.error, Broken) and shown.box.layout.display == "", name
    text = shown._text.value
    assert "Broken: what failed &lt;here&gt;" in text and "<summary>traceback</summary>" in text, name
    shown.box.children[1].click()
    assert shown.error is None and shown.box.layout.display == "none", name
    for run in panel._runs_section._trainer.runs:  # type: ignore[attr-defined]
        run.ended.set()
    assert panel.wait(WAIT_TIMEOUT_S) and not panel._editor.planner.is_searching and not panel._editor._is_measuring


def fail(*args: Any, **kwargs: Any) -> Any:
    raise Broken("what failed <here>")


class FakePage:
    def update(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_what_works_again_is_no_failure_any_more(panel: Panel, monkeypatch: pytest.MonkeyPatch):
    model = panel._editor.controls.presets["model"]
    with monkeypatch.context() as broken:
        broken.setattr(strategy_editor, "grid_view", fail)
        model.click()
    assert panel._failures.error is not None
    panel._editor.controls.presets["data"].click()
    assert panel._failures.error is not None, "something else works"
    model.click()
    assert panel._failures.error is None and str(panel.strategy) == "*: model"


def test_after_a_refused_strategy_the_panel_gets_well(panel: Panel):
    """Apply follows the strategy as Run does, Keep shows the run's strategy again, and what works removes the error."""
    panel.run()
    runs(panel).change()
    assert not runs(panel).apply_button.disabled
    controls = panel._editor.controls
    controls.text.value = "*: data; fc9: model"
    assert runs(panel).apply_button.disabled and runs(panel).apply_button.tooltip == "fix 1 problem first"
    runs(panel).apply_button.click()  # a click from before the button was disabled
    assert "no layer matches" in str(panel._failures.error)
    runs(panel).keep_button.click()
    assert panel._failures.error is None and not runs(panel).apply_button.disabled
    assert controls.text.value == "*: data" and panel.state.label == "data" and panel.tabs.chosen == "live"
    for act in (runs(panel).apply_button.click, controls.run.click):
        panel._failures.show(Broken())
        act()
        assert panel._failures.error is None and panel.running
        runs(panel)._poller.run.ended.set()  # type: ignore[union-attr]
        assert panel.wait(WAIT_TIMEOUT_S) and not controls.run.disabled


def test_a_panel_whose_session_has_ended_says_so_on_every_tab(panel: Panel):
    ended = panel._editor.controls.ended
    assert ended.value == "" and ended in panel.children[0].children
    panel._on_message(-1, RunEvent("closed", 0))
    assert "run the cell that makes the panel once more" in ended.value and panel._editor.controls.run.disabled


def test_a_click_that_cannot_be_shown_is_not_done(panel: Panel, monkeypatch: pytest.MonkeyPatch):
    before = panel._editor.grid.view
    with monkeypatch.context() as broken:
        broken.setattr(strategy_editor, "grid_view", lambda state, facts: fail() if "model" in state.text else before)
        panel._editor.controls.presets["model"].click()
        panel._editor.controls.zero.value = 1  # shown as before
    assert str(panel.strategy) == "*: data | zero=1" and panel._editor.controls.text.value == "*: data | zero=1"
    assert not panel._editor.controls.undo.disabled
    panel._editor.controls.undo.click()
    assert str(panel.strategy) == "*: data" and panel._editor.controls.undo.disabled


# ---- runs -----------------------------------------------------------------------------------------------------------


def failure_of(panel: Panel) -> str:
    return runs(panel).live.failure.value


def assert_over_and_can_run(panel: Panel, error: str) -> None:
    assert panel.wait(WAIT_TIMEOUT_S) and not panel.running
    assert isinstance(panel.error, Broken) and error in failure_of(panel) and "<details>" in failure_of(panel)
    assert "failed" in runs(panel).live.status.state.value and runs(panel).stop_button.disabled
    assert not panel._editor.controls.run.disabled
    panel.run()
    assert failure_of(panel) == "" and panel.error is None
    runs(panel)._poller.run.ended.set()  # type: ignore[union-attr]
    assert panel.wait(WAIT_TIMEOUT_S) and isinstance(panel.runs[-1], RunRecord)


def test_a_run_that_cannot_begin(panel: Panel, trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as broken:
        broken.setattr(trainer, "start", fail)
        panel._editor.controls.run.click()
    assert_over_and_can_run(panel, "what failed")


def test_a_run_is_over_when_its_end_is_shown(panel: Panel, monkeypatch: pytest.MonkeyPatch):
    shown, shows = [], runs(panel)._rest_shown

    def show_slowly() -> None:
        time.sleep(0.3)
        shown.append(panel.running)

    monkeypatch.setattr(runs(panel), "_rest_shown", [*shows, show_slowly])
    panel.run()
    runs(panel)._poller.run.ended.set()  # type: ignore[union-attr]
    while panel.running:
        time.sleep(0.01)
    assert panel.wait(WAIT_TIMEOUT_S) and shown == [False]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", [(FakeRun, "poll"), (FakeRun, "done"), (RunView, "add"), (RunView, "draw")])
def test_a_run_that_cannot_be_followed_is_stopped(panel: Panel, monkeypatch: pytest.MonkeyPatch, target: Target):
    with monkeypatch.context() as broken:
        broken.setattr(*target, fail)
        panel.run()
        run = panel._runs_section._trainer.runs[-1]  # type: ignore[attr-defined]
        assert panel.wait(WAIT_TIMEOUT_S)
    if target[1] != "done":
        assert run.commands == ["stop"], "nobody would see how it goes on"
    assert_over_and_can_run(panel, "what failed")


def test_a_prediction_that_fails_is_shown_and_the_run_goes_on(panel: Panel, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as broken:
        broken.setattr(Predictor, "estimate", fail)
        panel.run()
        assert panel.running and isinstance(panel._failures.error, Broken)
    runs(panel)._poller.run.ended.set()  # type: ignore[union-attr]
    assert panel.wait(WAIT_TIMEOUT_S) and panel.error is None and len(panel.runs) == 1


def test_a_drawing_that_fails_does_not_keep_a_run_from_ending(panel: Panel, monkeypatch: pytest.MonkeyPatch):
    panel.run()
    with monkeypatch.context() as broken:
        for name in ("finish", "fail"):
            broken.setattr(RunView, name, fail)
        runs(panel)._poller.run.ended.set()  # type: ignore[union-attr]
        assert panel.wait(WAIT_TIMEOUT_S)
    assert not panel.running and len(panel.runs) == 1 and isinstance(panel._failures.error, Broken)
    assert runs(panel).stop_button.disabled and not panel._editor.controls.run.disabled


def test_stop_asks_and_asked_once_more_does_not_wait(panel: Panel, trainer: FakeTrainer):
    class Stuck(FakeRun):
        """In a step that never ends."""

        def stop(self) -> None:
            self.commands.append("stop")

    def start_stuck(*args: object) -> FakeRun:
        trainer.runs.append(Stuck("stuck", "*: data", [block(0, (1.0,))]))
        return trainer.runs[-1]

    trainer.start = start_stuck  # type: ignore[method-assign, assignment]
    panel.run()
    stop = runs(panel).stop_button
    stop.click()
    assert panel.running and stop.description == "Stop now" and "stopping" in runs(panel).live.status.state.value
    stop.click()
    assert panel.wait(WAIT_TIMEOUT_S) and stop.description == "Stop"
    assert trainer.runs[-1].commands == ["stop", "interrupt"]


def test_a_change_that_is_refused_before_the_run_has_begun_does_not_end_it():
    go = threading.Event()

    def begin(observer: object) -> Any:
        assert go.wait(WAIT_TIMEOUT_S)
        return FakeRun(), ()

    run = _BackgroundRun(begin, fail)
    with pytest.raises(Broken):
        run.change(Strategy("*: model"))
    go.set()
    wait_until(lambda: run._run is not None, "it begins")
    assert not run.done() and run._run.commands == []  # type: ignore[union-attr, attr-defined]


def test_a_run_that_was_ended_before_it_began_leaves_no_open_file_and_no_log():
    go, made = threading.Event(), Mock()

    def begin(observer: object) -> Any:
        assert go.wait(WAIT_TIMEOUT_S)
        return made, ()

    run = _BackgroundRun(begin, fail)
    run.stop()
    run.interrupt()
    assert run.done()
    go.set()
    wait_until(lambda: made.result.called, "it ends")
    assert made.call.cancel.called
    with pytest.raises(RunStopped, match="stopped before it began"):
        run.result()


# ---- how they are shown ---------------------------------------------------------------------------------------------


def test_words_come_first_and_the_rest_is_behind_a_fold():
    words, _, fold = failure_html(StrategyError("\n".join(f"line {number}" for number in range(30)))).partition("<det")
    assert "line 11" in words and "line 12" not in words and "line 29" in fold
    assert "StrategyError" not in words, "ours are sentences"
    assert "KeyError: &#x27;1-2&#x27;" in failure_html(KeyError("1-2")) or "KeyError: '1-2'" in failure_html(
        KeyError("1-2")
    )


def test_outside_of_a_panel_nothing_is_caught():
    with pytest.raises(Broken):
        guarded(fail)()
    sink = Failures()
    with sink.collecting():
        inside = guarded(fail)
    inside()
    assert isinstance(sink.error, Broken)


def test_a_table_by_itself_shows_its_failures_too(monkeypatch: pytest.MonkeyPatch):
    view = show_runs([make_record("data")])
    monkeypatch.setattr(RunTable, "sort_by", fail)
    view.table.page._handle_custom_msg({"event": "sort", "value": "peak_bytes"}, [])
    assert isinstance(view.failures.error, Broken) and view.failures.box in view.children
