"""A strategy that is written as text: what it keeps, what it names, and what does not parse."""

from __future__ import annotations

from tests.ui.models import MLP as LAYERS
from workbench.core.strategy import Strategy
from workbench.ui.panel import Panel
from workbench.ui.strategy.state import PanelState


def make(strategy: Strategy | str | None = None) -> PanelState:
    return PanelState(LAYERS, 2, strategy)


def test_text_that_does_not_parse_changes_nothing_but_the_draft():
    state = make("hybrid")
    before = state.strategy
    state.set_text("fc1: dta")
    assert state.strategy is before and state.text == "fc1: dta"
    assert "'fc1: dta'" in state.text_problem and not state.can_run and state.can_undo
    state.undo()
    assert state.strategy is before and state.text == str(before) and state.can_run and not state.can_undo
    state.set_text("fc1: dta")
    state.set_choice(["fc1"], "model")
    assert not state.text_problem and state.can_run


def test_text_can_be_pasted_from_a_script():
    state = make()
    text = "fc1: data; fc2: data; fc3: model; head: model | 1x1x2"
    state.set_text(text)
    assert state.text == text and str(Strategy(state.text)) == text
    assert not state.base and state.label == text


def test_degrees_that_are_written_stay_also_where_the_planner_chose_them_before():
    state = make()
    state.set_planned(Strategy("*: data | 1x2x1"))
    state.set_choice(["fc1"], "model")
    assert state.options.degrees is None, "nobody has written the planner's"
    state.set_text("*: data | 1x2x1")
    assert state.base == "planner's choice"
    state.set_choice(["fc1"], "data")
    assert state.options.degrees == (1, 2, 1)


def test_text_may_name_a_preset():
    state = make()
    state.set_text("hybrid")
    assert state.base == "hybrid" and not state.is_edited


def test_text_may_be_a_preset_with_options():
    state = make()
    state.set_text("pipeline|mb=8")
    assert (state.base, state.label, state.options.num_micro_batches) == ("pipeline | mb=8", "pipeline | mb=8", 8)
    state.set_num_ranks(4)
    assert (state.label, str(state.options)) == ("pipeline | mb=8", "4x1x1 mb=8 1f1b")
    state.set_options(num_micro_batches=4)
    assert state.label == "pipeline | mb=8, edited"
    state.set_text("pipline | mb=8")
    assert "did you mean 'pipeline | mb=8'?" in state.text_problem


def test_large_numbers_of_the_text_are_shown_and_stay(panel: Panel):
    controls = panel._editor.controls
    controls.text.value = "*: data | 1x8192x1 mb=81920"
    assert (controls.degrees["data"].value, controls.micro_batches.value) == (8192, 81920)
    assert controls.micro_batches.layout.width == "54px" and controls.overlap.layout.width == "46px"
    controls.degrees["model"].value = 2
    assert controls.text.value == "*: data | 1x8192x2 mb=81920"
