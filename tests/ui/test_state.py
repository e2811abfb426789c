"""The panel's state machine: edits in, strategy and mistakes out. The strategies are the real ones of the core."""

from __future__ import annotations

import pytest

from workbench.core.strategy import Layer, Strategy
from workbench.errors import StrategyError
from workbench.ui.placing import Choice, Degrees
from workbench.ui.state import PanelState


def linear(name: str, out_features: int, in_features: int) -> Layer:
    shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
    return Layer(name, "Linear", shapes, out_features * in_features + out_features)


LAYERS = [linear("fc1", 256, 64), linear("fc2", 256, 256), linear("fc3", 128, 256), linear("head", 10, 128)]


def make(strategy: Strategy | str | None = None, num_ranks: int = 2) -> PanelState:
    return PanelState(LAYERS, num_ranks, strategy)


def test_starts_data_parallel_and_valid():
    state = make()
    assert state.text == "*: data" and state.label == "data" and state.can_run
    assert state.degrees == Degrees(1, 2, 1)
    assert state.choices == [Choice("data")] * 4


def test_one_toggle_writes_one_row():
    state = make()
    state.set_parallel(["fc3"], "model")
    assert state.text == "*: data; fc3: model" and state.label == "data, edited"
    assert state.degrees == Degrees(1, 1, 2)
    assert state.choices[2] == Choice("model", "column")


def test_toggling_back_leaves_no_row_behind():
    state = make()
    state.set_parallel(["fc3"], "model")
    state.set_parallel(["fc3"], "data")
    assert state.text == "*: data" and state.label == "data"


def test_several_layers_at_once():
    state = make()
    state.set_parallel(["fc3", "head"], "model")
    assert [choice.split for choice in state.choices] == [None, None, "column", "row"]


def test_a_stage_moves_the_layers_behind_it_and_the_degrees_follow():
    state = make()
    state.set_stage(["fc3"], 1)
    assert [choice.stage for choice in state.choices] == [0, 0, 1, 1]
    assert state.degrees == Degrees(2, 1, 1) and state.can_run


def test_degrees_follow_after_a_preset_that_names_them():
    state = make("hybrid")
    assert state.strategy.options.degrees == (1, 1, 2)
    state.set_stage(["fc3"], 1)
    assert state.degrees == Degrees(2, 1, 1) and state.can_run


def test_degrees_that_the_user_set_stay_and_are_checked():
    state = make()
    state.set_degrees(Degrees(1, 1, 2))
    assert state.text == "*: data | 1x1x2"
    state.set_stage(["fc3"], 1)
    assert state.written_degrees == Degrees(1, 1, 2)
    assert not state.can_run and "pipeline degree 1" in str(state.mistakes[0])


def test_a_mistake_stays_at_its_row_and_pictures_keep_the_last_valid_choice():
    state = make("pipeline")
    before = state.drawn
    state.set_stage(["head"], 0)
    [mistake] = state.mistakes
    assert mistake.layer == "head" and "stages cannot go back" in mistake.message
    assert state.drawn == before and state.choices[3].stage == 0
    assert state.num_problems == 1 and not state.can_run


def test_fixes_can_be_applied():
    state = make("pipeline")
    state.set_stage(["head"], 0)
    assert state.apply_fix("use stage 1", "head") and state.can_run


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_degree_fix_fits_the_ranks(num_ranks: int):
    state = make(num_ranks=num_ranks)
    state.set_degrees(Degrees(1, 3, 1))
    assert state.apply_fix(state.mistakes[0].fixes[0]) and state.can_run
    assert state.degrees.num_ranks == num_ranks


def test_an_unknown_layer_is_replaced_by_the_nearest_name():
    state = make()
    state.set_text("fc11: model")
    assert "nearest" in state.mistakes[0].message and not state.can_run
    assert state.apply_fix("write 'fc1: model'")
    assert state.text == "fc1: model" and state.can_run


def test_a_fix_that_only_the_user_can_do_is_refused():
    assert not make().apply_fix("put a layer on stage 1, or renumber")


def test_text_that_does_not_parse_changes_nothing_but_the_draft():
    state = make("hybrid")
    before = state.strategy
    state.set_text("fc1: dta")
    assert state.strategy is before and state.text == "fc1: dta"
    assert "'fc1: dta'" in state.text_problem and not state.can_run
    state.set_parallel(["fc1"], "model")
    assert not state.text_problem and state.can_run


def test_text_can_be_pasted_from_a_script():
    state = make()
    text = "fc1: data; fc2: data; fc3: model; head: model | 1x1x2"
    state.set_text(text)
    assert state.text == text and str(Strategy(state.text)) == text
    assert state.label == "custom"


def test_text_may_name_a_preset():
    state = make()
    state.set_text("hybrid")
    assert state.base == "hybrid" and not state.is_edited


def test_splits_cycle_through_open_column_row():
    state = make()
    seen = []
    for _ in range(3):
        state.cycle_split(["fc3"])
        seen.append(str(state.strategy.row_of("fc3")))
    assert seen == ["fc3: model:column", "fc3: model:row", "fc3: model"]


def test_undo_and_redo():
    state = make()
    texts = [state.text]
    for name in ("fc1", "fc2", "fc3"):
        state.set_parallel([name], "model")
        texts.append(state.text)
    while state.can_undo:
        assert state.text == texts.pop()
        state.undo()
    assert [state.text] == texts == ["*: data"]
    state.redo()
    assert state.text == "*: data; fc1: model"
    state.set_stage(["head"], 1)
    assert not state.can_redo, "a new edit forgets what was undone"


def test_undo_at_the_start_does_nothing():
    state = make()
    state.undo()
    state.redo()
    assert state.text == "*: data"


def test_a_preset_that_cannot_be_made_is_a_problem_not_a_crash():
    state = make(num_ranks=8)
    state.set_preset("pipeline")
    assert "8 ranks" in state.text_problem and not state.can_run
    assert state.strategy == Strategy("*: data")


def test_options():
    state = make("pipeline")
    state.set_options(num_micro_batches=8, schedule="gpipe")
    assert state.text.endswith("| 2x1x1 mb=8 gpipe")


def test_a_strategy_that_does_not_parse_is_refused_at_once():
    with pytest.raises(StrategyError, match="fc1: dta"):
        make("fc1: dta")


def test_a_strategy_that_does_not_fit_is_shown_with_its_mistakes():
    state = make("nowhere: model")
    assert state.num_problems == 1
    assert state.drawn == [Choice("data")] * 4
