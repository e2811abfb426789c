"""The panel's state machine: edits in, strategy and mistakes out. The strategies are the real ones of the core."""

from __future__ import annotations

import random

import pytest

from tests.core.odd_names import odd_names
from tests.ui.models import GPT_HYBRID, gpt, linear
from tests.ui.models import MLP as LAYERS
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
from workbench.errors import StrategyError
from workbench.ui.strategy.choices import Choice, Degrees
from workbench.ui.strategy.edit_rows import clauses
from workbench.ui.strategy.fixes import apply_fix
from workbench.ui.strategy.state import PanelState


def make(strategy: Strategy | str | None = None, num_ranks: int = 2) -> PanelState:
    return PanelState(LAYERS, num_ranks, strategy)


def test_starts_data_parallel_and_valid():
    state = make()
    assert state.text == "*: data" and state.label == "data" and state.can_run
    assert state.degrees == Degrees(1, 2, 1)
    assert state.choices == [Choice("data")] * 4


def test_one_toggle_writes_one_row():
    state = make()
    state.set_choice(["fc3"], "model")
    assert state.text == "*: data; fc3: model" and state.label == "data, edited"
    assert state.degrees == Degrees(1, 1, 2)
    assert state.choices[2] == Choice("model", "column")


def test_toggling_back_leaves_no_row_behind():
    state = make()
    state.set_choice(["fc3"], "model")
    state.set_choice(["fc3"], "data")
    assert state.text == "*: data" and state.label == "data"


def test_several_layers_at_once():
    state = make()
    state.set_choice(["fc3", "head"], "model")
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
    assert apply_fix(state, "use stage 1", "head") and state.can_run


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_degree_fix_fits_the_ranks(num_ranks: int):
    state = make(num_ranks=num_ranks)
    state.set_degrees(Degrees(1, 3, 1))
    assert apply_fix(state, state.mistakes[0].fixes[0]) and state.can_run
    assert state.degrees.num_ranks == num_ranks


def test_an_unknown_layer_is_replaced_by_the_nearest_name():
    state = make()
    state.set_text("fc11: model")
    assert "nearest" in state.mistakes[0].message and not state.can_run
    assert apply_fix(state, "write 'fc1: model'")
    assert state.text == "fc1: model" and state.can_run


def test_a_fix_that_only_the_user_can_do_is_refused():
    assert not apply_fix(make(), "put a layer on stage 1, or renumber")


@pytest.mark.parametrize("choice", ["model:column", "model:row", "model", "data"])
def test_every_choice_can_be_set(choice: str):
    state = make("hybrid")
    state.set_choice(["fc3"], choice)
    row = state.strategy.row_of(next(layer for layer in state.layers if layer.name == "fc3"))
    assert row is not None and str(row) == f"fc3: {choice}"


def test_undo_and_redo():
    state = make()
    texts = [state.text]
    for name in ("fc1", "fc2", "fc3"):
        state.set_choice([name], "model")
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
    assert "8 stages" in state.text_problem and not state.can_run
    assert state.strategy == Strategy("*: data")


def test_options():
    state = make("pipeline")
    state.set_options(num_micro_batches=8, schedule="gpipe")
    assert state.text.endswith("| 2x1x1 mb=8 gpipe")


def test_stages_of_the_preset_follow_the_schedule():
    """Twice as many where ranks have two; stages that a user has chosen stay."""
    state = make("pipeline | mb=1")
    state.set_options(schedule="zero_bubble_v")
    assert (state.can_run, state.text) == (
        True,
        "fc1: data@0; fc2: data@1; fc3: data@2; head: data@3 | 2x1x1 zero_bubble_v",
    )
    state.set_options(schedule="1f1b")
    assert state.can_run and state.strategy.rows == make("pipeline").strategy.rows
    state.set_stage(["fc2"], 1)
    rows = state.strategy.rows
    state.set_options(schedule="dualpipe_v")
    state.set_degrees(Degrees(2, 1, 1))
    assert state.strategy.rows == rows and not state.can_run
    (mistake,) = state.mistakes
    assert mistake.fixes == ("number the stages 0 to 3",)


def test_a_strategy_that_does_not_parse_is_refused_at_once():
    with pytest.raises(StrategyError, match="fc1: dta"):
        make("fc1: dta")


def test_a_strategy_that_does_not_fit_is_shown_with_its_mistakes():
    state = make("nowhere: model")
    assert state.num_problems == 1
    assert state.drawn == [Choice("data")] * 4


# ---- rows that stand for several layers ---------------------------------------------------------------------


def deep(strategy: str = GPT_HYBRID) -> PanelState:
    return PanelState(gpt().layers, 4, strategy)


def patterns(state: PanelState) -> list[str]:
    return [row.node.pattern for row in state.rows]


def test_a_group_s_toggle_sets_all_its_layers_in_one_row():
    state = deep("data")
    state.set_choice(["blocks.[0-7]"], "model")
    assert state.text == "*: data; blocks.[0-7]: model"
    assert {choice.parallel for choice in state.choices[2:50]} == {"model"} and state.can_run


def test_a_layer_set_apart_makes_its_group_mixed():
    state = deep("data")
    state.set_choice(["blocks.[0-7].mlp.fc1"], "model")
    assert state.text == "*: data; blocks.[0-7].mlp.fc1: model"
    assert sum(choice.parallel == "model" for choice in state.choices) == 8


def test_setting_the_group_again_leaves_nothing_of_its_parts_behind():
    state = deep("data")
    for part in ("mlp.fc1", "mlp.fc2", "attn.qkv"):
        state.set_choice([f"blocks.[0-7].{part}"], "model")
    state.set_choice(["blocks.[0-7]"], "data")
    assert state.text == "*: data" and state.label == "data"


def test_one_block_set_apart_cuts_the_run():
    state = deep("data")
    state.look_for("blocks.3.mlp*")
    assert patterns(state) == ["blocks.3.mlp.fc1", "blocks.3.mlp.fc2"]
    state.set_choice(patterns(state), "model")
    state.look_for("")
    assert patterns(state) == [
        "tok_emb",
        "pos_emb",
        "blocks.[0-7]",
        "blocks.[0-2]",
        "blocks.3",
        "blocks.[4-7]",
        "ln_f",
        "lm_head",
    ]
    state.set_choice(["blocks.[0-7]"], "data")
    assert patterns(state) == ["tok_emb", "pos_emb", "blocks.[0-7]", "ln_f", "lm_head"] and state.text == "*: data"


def test_setting_a_group_keeps_the_stages_of_its_parts():
    state = deep()
    state.set_choice(["blocks.[0-3]", "blocks.[4-7]"], "data")
    stages = [choice.stage for choice in state.choices]
    assert stages == [0] * 26 + [1] * 26
    assert "blocks.[4-7]: data@1" in state.text


def test_folding_is_remembered_when_the_run_is_cut_otherwise():
    state = deep("data")
    state.fold("blocks.[0-7]")
    assert "blocks.[0-7].ln_1" in patterns(state)
    state.set_stage(["blocks.[0-7]"], 0)
    state.set_choice(["lm_head"], "model")
    assert "blocks.[0-7].ln_1" in patterns(state)
    state.fold("blocks.[0-7]")
    assert "blocks.[0-7].ln_1" not in patterns(state)


def test_finding_is_by_part_of_a_name_or_by_glob():
    state = deep("data")
    state.look_for("QKV")
    assert len(patterns(state)) == 8
    state.look_for("*_emb")
    assert patterns(state) == ["tok_emb", "pos_emb"]
    state.look_for("nothing like this")
    assert patterns(state) == []


def test_a_fix_at_a_group_is_for_all_its_layers():
    state = deep()
    state.set_stage(["blocks.[4-7]"], 1)
    state.set_stage(["ln_f", "lm_head"], 0)
    assert state.num_problems == 1
    assert apply_fix(state, "use stage 1", "ln_f") and apply_fix(state, "use stage 1", "lm_head") and state.can_run


def test_presets_that_cannot_be_made_say_why():
    state = PanelState(LAYERS, 8)
    assert "8 stages" in state.presets["pipeline"] and state.presets["data"] == ""


def test_the_planner_s_choice_is_a_start_like_a_preset():
    state = make()
    state.set_planned(Strategy("*: model"))
    assert state.label == "planner's choice"
    state.set_choice(["head"], "data")
    assert state.label == "planner's choice, edited"
    state.undo()
    state.undo()
    assert state.label == "data"


@pytest.mark.parametrize("seed", range(10))
def test_random_edits_do_what_they_say_and_nothing_else(seed: int):
    rng = random.Random(seed)
    state = deep(rng.choice(["data", "hybrid", "model", GPT_HYBRID]))
    for _ in range(12):
        nodes = [row.node for row in state.rows]
        node = rng.choice(nodes)
        choice = rng.choice(["data", "model", "model:row"])
        before = [(row.parallel, row.split, row.stage) for row in state.strategy.rows_of(state.layers)]
        state.set_choice([node.pattern], choice)
        after = [(row.parallel, row.split, row.stage) for row in state.strategy.rows_of(state.layers)]
        parallel, _, split = choice.partition(":")
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            wanted = (parallel, split or None, old[2]) if index in node.layers else old
            assert new == wanted, (state.layers[index].name, state.text)
        assert Strategy(state.text) == state.strategy
        if node.children and rng.random() < 0.5 and node.pattern in patterns(state):
            state.fold(node.pattern)


def test_experts_are_toggled_and_other_layers_of_the_row_keep_their_choice():
    parts = [("gate", "Router", 0), ("experts", "Experts", 8), ("shared", "Linear", 0)]
    layers = [
        Layer(f"blocks.{n}.{name}", kind, {"weight": (8, 4, 4) if experts else (4, 4)}, experts=experts)
        for n in range(2)
        for name, kind, experts in parts
    ]
    state = PanelState(layers, 4, "*: model | 1x2x2")
    state.set_choice(["*"], "expert")
    assert state.text == "*: model; *: expert | 1x2x2"
    assert [str(choice) for choice in state.choices[:3]] == ["model", "expert:2", "model:column"]
    state.set_choice(["blocks.[0-1].experts"], "expert:4")
    assert state.can_run and state.resolved.layers[1].over_data == 2
    state.set_choice(["*"], "expert:3")
    assert not state.can_run and "write '*: expert:4'" in state.mistakes[0].fixes
    apply_fix(state, "write '*: expert:4'")
    assert state.can_run
    state.set_choice(["*"], "data")
    assert state.text == "*: data | 1x2x2"
    state.undo()
    assert state.can_run and "expert" in state.text


@pytest.mark.parametrize(
    ("written", "fix", "text"),
    [
        ("*.ffn.experts: expert", "blocks.*.ffn.experts: expert", "*: data; blocks.*.ffn.experts: expert"),
        ("*1.ffn: model", "blocks.1.ffn: model", "*: data; blocks.1.ffn: model"),
        ("*gate*: model", "blocks.*.ffn.gate: model", "*: data; blocks.*.ffn.gate: model"),
    ],
)
def test_a_star_over_several_names_gets_the_row_that_says_so(written: str, fix: str, text: str):
    layers = [
        Layer(f"blocks.{n}.ffn.{name}", name, {"weight": (8, 4, 4)}, experts=experts)
        for n in range(3)
        for name, experts in (("gate", 0), ("experts", 8 * n))
    ]
    state = PanelState(layers, 4, f"*: data; {written}")
    assert [mistake.message for mistake in state.mistakes] == [
        f"no layer matches {written.split(':')[0]!r}: a * is a part of one name, between two dots"
    ]
    assert state.mistakes[0].fixes == (f"write {fix!r}",)
    apply_fix(state, state.mistakes[0].fixes[0])
    assert state.can_run and state.text == text


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(20))
def test_edits_reach_their_layers_whatever_the_names_are(seed: int):
    rng = random.Random(seed)
    names = odd_names(rng)
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    state = PanelState([linear(name, 8, 8) for name in names], 2)
    for _ in range(8):
        row = rng.choice(state.rows).node
        given = names[row.layers[0]] if len(row.layers) == 1 and rng.random() < 0.5 else row.pattern
        wanted = [choice.parallel for choice in state.choices]
        parallel = rng.choice(["data", "model"])
        for index in row.layers:
            wanted[index] = parallel
        state.set_choice([given], parallel)
        assert [choice.parallel for choice in state.choices] == wanted and state.can_run, state.mistakes
        assert PanelState(state.layers, 2, state.text).choices == state.choices


def test_a_row_that_a_later_one_covers_is_shown_as_a_mistake():
    state = make("fc1: model; *: data")
    assert not state.can_run and "decides no layer" in state.mistakes[0].message
    assert clauses(state.text, [], LAYERS) == [("fc1: model", "wrong"), ("; ", "quiet"), ("*: data", "")]
    state.set_choice(["fc1"], "model")
    assert state.can_run and state.choices[0].parallel == "model" and state.choices[1].parallel == "data"
