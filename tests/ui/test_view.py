"""What the grid draws: slices, boxings and bytes are those of the core, for every kind of strategy."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.ui.models import GPT_HYBRID, MLP, gpt
from workbench.cli.demo import make_mlp
from workbench.core.boxing import plan_boxing
from workbench.core.layer_extents import LayerExtents, of_linear_layers, traced
from workbench.core.layer_plan import LayerEdge, wire_bytes
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.rows import Layer
from workbench.core.sharding_plan import ShardingPlan
from workbench.core.strategy import ResolvedStrategy, Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware_files import load_hardware
from workbench.training.costs.dry_run import dry_run
from workbench.training.parallel import describe
from workbench.ui.grid import boxing_column
from workbench.ui.grid.view import Facts, boxings_of, grid_view
from workbench.ui.static_panel import static_grid_html
from workbench.ui.strategy.state import PanelState
from workbench.ui.strategy_editor import facts_of
from workbench.units import format_bytes


def mlp_facts(batch_size: int = 128, sample_shape: tuple[int, ...] = (64,)) -> Facts:
    return Facts(batch_size, of_linear_layers(MLP, sample_shape), "cross_entropy", is_cross_entropy=True)


def view_of(strategy: str, num_ranks: int = 2, sample_shape: tuple[int, ...] = (64,)) -> dict[str, Any]:
    return grid_view(PanelState(MLP, num_ranks, strategy), mlp_facts(sample_shape=sample_shape))


def gpt_state(strategy: str = GPT_HYBRID, num_ranks: int = 4, num_blocks: int = 8) -> tuple[PanelState, Facts]:
    costs = gpt(num_blocks)
    facts = Facts(32, traced(costs.layers, costs.rows, (64,)), "cross_entropy", is_cross_entropy=True)
    return PanelState(costs.layers, num_ranks, strategy), facts


def edges_of(
    layers: list[Layer], resolved: ResolvedStrategy, extents: list[LayerExtents], batch: int
) -> list[LayerEdge]:
    return boxing_column.boxings_of(ShardingPlan(layers, resolved), extents, batch).layer_edges


def row(view: dict[str, Any], pattern: str) -> dict[str, Any]:
    return next(row for row in view["rows"] if row["pattern"] == pattern)


def slices(entry: dict[str, Any]) -> list[Any]:
    return entry["pictures"][0]["slices"]


def test_view_travels_as_json():
    view = grid_view(*gpt_state())
    assert json.loads(json.dumps(view)) == json.loads(json.dumps(view, default=list))


def test_data_parallel_ranks_hold_the_whole_weight():
    fc1 = row(view_of("data"), "fc1")
    assert fc1["weight"] == "256 \u00d7 64" and fc1["params"] == "16.6 k" and fc1["sbp"] == "B"
    for held in slices(fc1):
        assert held["text"] == "all of 256 \u00d7 64, 65.5 kB"
        assert [(part["x"], part["y"], part["w"], part["h"]) for part in held["parts"]] == [(0, 0, 1, 1)]


def test_a_parameter_that_layers_share_counts_once():
    costs = gpt(2)
    tied = [replace(layer, tied_to="tok_emb") if layer.name == "lm_head" else layer for layer in costs.layers]
    facts = Facts(32, traced(tied, costs.rows, (64,)))
    view = grid_view(PanelState(tied, 2, "data"), facts)
    assert (row(view, "tok_emb")["params"], row(view, "lm_head")["params"]) == ("1.05 M", "4.10 k"), "the bias"
    shared = [replace(layer, elsewhere=("bias",)) if layer.name == "lm_head" else layer for layer in tied]
    assert row(grid_view(PanelState(shared, 2, "data"), facts), "lm_head")["params"] == "(shared)"


def test_column_is_a_band_of_rows_and_row_a_band_of_columns():
    view = view_of("hybrid")
    column, by_row = row(view, "fc3"), row(view, "head")
    assert (column["sbp"], column["choice_text"]) == ("S(0)", "model:column")
    assert (by_row["sbp"], by_row["choice_text"]) == ("S(1)", "model:row")
    assert [held["text"] for held in slices(column)] == ["rows 0-63 of 128, 65.5 kB", "rows 64-127 of 128, 65.5 kB"]
    assert [held["text"] for held in slices(by_row)] == [
        "columns 0-63 of 128, 2.56 kB",
        "columns 64-127 of 128, 2.56 kB",
    ]
    assert slices(column)[1]["parts"][0] == {"x": 0.0, "y": 0.5, "w": 1.0, "h": 0.5, "shade": 1}
    assert slices(by_row)[1]["parts"][0] == {"x": 0.5, "y": 0.0, "w": 0.5, "h": 1.0, "shade": 1}


def test_a_stage_holds_its_layers_alone():
    view = view_of("pipeline")
    assert [stage["label"] for stage in view["stages"]] == ["stage 0", "stage 1"]
    for entry in view["rows"]:
        held = [part is not None for part in slices(entry)]
        assert held == entry["on"] == [entry["stage"] == 0, entry["stage"] == 1]


def test_boxings_between_layers_have_kind_and_bytes_forward_and_back():
    boxings = {entry["pattern"]: entry["boxings"] for entry in view_of("hybrid")["rows"]}
    assert boxings["fc1"]["boxing"] is None and boxings["fc2"]["boxing"] is None
    boxing = boxings["fc3"]["boxing"]
    assert (boxing["change"], boxing["kind"]) == ("S(0) \u2192 B", "all-gather")
    assert boxing["bytes"] == "131 + 131 kB", "(p-1) |T| = 128 x 256 x 4 bytes, and a reduce-scatter of as much back"
    assert boxings["head"]["boxing"] is None, "column to row needs nothing"
    assert [boxings[name]["layout"] for name in ("fc2", "fc3", "head")] == ["S(0)", "S(1)", "P"]
    assert boxings["fc1"]["note"] == "grad sum 133 kB per step", "2 (p-1) |W| = 2 x 16640 x 4 bytes"
    assert boxings["fc3"]["note"] == ""


def test_stages_send_and_micro_batches_make_it_less():
    boxing = next(entry["boxings"]["boxing"] for entry in view_of("pipeline")["rows"] if entry["boxings"]["boxing"])
    assert boxing["change"] == "B@0 \u2192 B@1" and boxing["kind"] == "send"
    assert boxing["bytes"] == "32.8 + 32.8 kB", "128 / 4 samples x 256 features x 4 bytes"


def test_partial_sums_are_summed_where_they_arise():
    resolved = Strategy("*: model:row").resolve(MLP, 2)
    steps = edges_of(MLP, resolved, of_linear_layers(MLP, (64,)), 128)
    assert [[plan.kind for plan in step.plans] for step in steps[1:]] == [["all-reduce", "slice"]] * 3


def test_the_gradient_goes_the_other_way_with_dual_layouts():
    resolved = Strategy("fc1: data; fc2: model").resolve(MLP, 2)
    step = edges_of(MLP, resolved, of_linear_layers(MLP, (64,)), 128)[1]
    [back] = step.backward_plans
    assert (str(step.plans[0].kind), back.kind) == ("all-gather", "reduce-scatter")
    assert back.source.has_partial and not back.destination.has_partial


def test_totals_add_up():
    state = PanelState(MLP, 2, "hybrid")
    total, parts = grid_view(state, mlp_facts())["total"]
    bias_of_the_row = 10
    activations, gradients = 2 * 128 * 4 * (256 + 10), 2 * 4 * (16640 + 65792 + bias_of_the_row)
    assert total == f"about {(activations + gradients) / 1000:.0f} kB", "nothing has counted it"
    assert parts == "272 kB activations + 660 kB gradients"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [("data", 2), ("model", 2), ("pipeline", 2), ("hybrid", 4), ("*: data; head: model:column | 1x1x2", 2),
     ("*: data; head: model:column | 1x1x4", 4), ("*: data; head: model | 1x2x2", 4),
     ("*: model | 1x2x2 mb=2 zero=1", 4), ("*: model | 1x2x2 mb=4 zero=2", 4), ("*: model | 1x2x2 zero=3", 4),
     ("fc1: data; fc2: data; fc3: data@1; head: data@1 | 2x2x1 mb=2 zero=3", 4)],
)  # fmt: skip
def test_the_total_is_what_a_dry_run_counts(strategy: str, num_ranks: int):
    inputs, targets = torch.empty(128, 64), torch.zeros(128, dtype=torch.int64)
    state = PanelState(describe(make_mlp()), num_ranks, strategy)
    total, _ = grid_view(state, facts_of(state.layers, 128, (64,), cross_entropy))["total"]
    counted = dry_run(make_mlp, str(state.strategy), num_ranks, inputs, targets, cross_entropy)
    assert total == f"about {format_bytes(sum(counted.sent_bytes))}"


def test_under_zero_weights_travel_too():
    fc1 = row(view_of("*: data | 1x2x1 zero=3"), "fc1")
    assert fc1["boxings"]["note"] == "grads + weights 200 kB per step", "3 (p-1) |W|"


def test_bytes_are_not_guessed_where_shapes_are_unknown():
    view = view_of("hybrid", sample_shape=(3, 8, 8))
    assert row(view, "fc3")["boxings"]["boxing"]["bytes"] == ""
    assert view["total"][1] == "shapes of activations are not known"
    facts = replace(mlp_facts(sample_shape=(3, 8, 8)), problem="counting")
    _, parts = grid_view(PanelState(MLP, 2, "hybrid"), facts)["total"]
    assert parts == "shapes of activations are not known: counting"


def test_a_mistake_is_at_its_row_with_its_fix_and_the_last_picture():
    state = PanelState(MLP, 2, "pipeline")
    state.set_stage(["head"], 0)
    view = grid_view(state, mlp_facts())
    head = row(view, "head")
    assert head["bad"] == "stage" and head["kept"] and head["stage"] == 0 and head["on"] == [False, True]
    assert head["mistakes"][0]["fixes"] == [{"label": "use stage 1", "value": "use stage 1"}]
    assert not row(view, "fc1")["mistakes"]


def test_the_loss_is_the_last_row():
    end = view_of("hybrid")["end"]
    assert (end["label"], end["text"]) == ("cross_entropy", "follows head")
    assert end["boxings"]["boxing"]["kind"] == "reduce-scatter", "the head gives a sum"
    assert view_of("data")["end"]["boxings"]["boxing"] is None


@pytest.mark.parametrize("loss", [cross_entropy, torch.nn.CrossEntropyLoss(), partial(cross_entropy, ignore_index=0)])
def test_a_cross_entropy_over_split_classes_has_its_exchange(loss: Any):
    state = PanelState(MLP, 2, "*: data; fc3: model:row; head: model:column")
    end = grid_view(state, facts_of(MLP, 128, (64,), loss))["end"]["boxings"]
    assert end["layout"] == "S(0)" and end["boxing"]["change"] == "S(1) \u2192 S(0)"


def test_slices_have_the_bytes_of_their_own_dtype():
    layers = [replace(layer, itemsize=2, itemsizes={"bias": 4}) for layer in MLP]
    fc1 = row(grid_view(PanelState(layers, 2, "data"), mlp_facts()), "fc1")
    assert {held["text"] for held in slices(fc1)} == {"all of 256 \u00d7 64, 32.8 kB"}


def test_a_search_that_finds_nothing_has_no_rows():
    state, facts = gpt_state()
    state.look_for("no such layer")
    view = grid_view(state, facts)
    assert view["rows"] == [] and view["end"] is None and view["find"]["found"] == 0
    assert "boxed per step" in static_grid_html(view)


@pytest.mark.parametrize(("num_ranks", "num_columns"), [(1, 1), (2, 2), (8, 8), (9, 1), (64, 1)])
def test_columns_fit_whatever_the_number_of_ranks(num_ranks: int, num_columns: int):
    view = view_of("data", num_ranks)
    assert len(view["columns"]) == num_columns
    assert view["ranks_width"] <= 334
    centres = [column["centre"] for column in view["columns"]]
    assert centres == sorted(centres) and centres[-1] < view["ranks_width"]


def test_long_pipelines_scroll_instead_of_overlapping():
    state, facts = gpt_state("pipeline", num_ranks=32, num_blocks=32)
    view = grid_view(state, facts)
    assert (
        view["ranks_width"] == 32 * 28 and [len(column["label"]) for column in view["columns"]] == [1] * 10 + [2] * 22
    )


def test_many_ranks_show_all_slices_in_one_picture():
    held = slices(row(view_of("model", 16), "fc2"))[0]
    assert len(held["parts"]) == 16 and held["text"] == "16 slices of 16.4 kB on 16 ranks"
    assert sum(part["w"] * part["h"] for part in held["parts"]) == pytest.approx(1)


def test_slices_too_thin_to_see_are_one_fill():
    held = slices(row(view_of("model", 64), "fc2"))[0]
    assert len(held["parts"]) == 1 and held["text"].startswith("64 slices")


def test_copies_are_counted():
    state, facts = gpt_state("*: model | 1x2x8", num_ranks=16)
    held = slices(row(grid_view(state, facts), "lm_head"))[0]
    assert held["note"] == "\u00d72" and "8 slices" in held["text"]


def test_rows_with_note_and_badge_have_room_for_both():
    assert [entry["height"] for entry in view_of("hybrid")["rows"]] == [32, 42, 32, 42], "the loss is a row, too"


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_equal_blocks_are_one_row_and_its_parts_when_it_is_unfolded():
    state, facts = gpt_state()
    labels = [entry["label"] for entry in grid_view(state, facts)["rows"]]
    assert labels == ["tok_emb", "pos_emb", "blocks.0-3 \u00d74", "blocks.4-7 \u00d74", "ln_f", "lm_head"]
    state.fold("blocks.[4-7]")
    view = grid_view(state, facts)
    inside = [(entry["label"], entry["choice_text"]) for entry in view["rows"] if entry["depth"]]
    assert inside[1:3] == [("attn.qkv", "model:column"), ("attn.proj", "model:row")]
    assert row(view, "blocks.[4-7]")["open"] is True and row(view, "blocks.[0-3]")["open"] is False


def test_a_folded_row_sums_up_what_is_inside():
    state, facts = gpt_state()
    blocks = row(grid_view(state, facts), "blocks.[0-3]")
    assert (blocks["weight"], blocks["sbp"], blocks["params"]) == ("24 weights", "mixed", "3.16 M")
    assert len(blocks["pictures"]) == 4 and blocks["boxings"]["note"].startswith("7 \u00d7 all-reduce inside")
    assert blocks["boxings"]["boxing"]["kind"] == "all-gather"


def test_an_unfolded_row_leaves_badges_to_its_parts():
    state, facts = gpt_state()
    state.fold("blocks.[4-7]")
    view = grid_view(state, facts)
    assert row(view, "blocks.[4-7]")["boxings"]["boxing"]["kind"].startswith("send")
    assert row(view, "blocks.[4-7].ln_1")["boxings"]["boxing"] is None, "it stands at the row above"
    assert row(view, "blocks.[4-7].ln_2")["boxings"]["boxing"]["kind"] == "all-reduce"
    assert row(view, "blocks.[4-7].mlp.fc2")["boxings"]["note"].startswith("all-reduce between blocks")


def test_the_same_mistake_of_many_layers_is_said_once():
    state, facts = gpt_state()
    state.set_stage(["blocks.[4-7]"], 0)
    state.set_stage(["blocks.[0-3]"], 1)
    blocks = next(entry for entry in grid_view(state, facts)["rows"] if entry["mistakes"])
    assert len(blocks["mistakes"]) == 1 and "(24 times)" in blocks["mistakes"][0]["message"]
    assert state.num_problems < 4


def test_a_thousand_layers_are_a_few_rows():
    state, facts = gpt_state("data", num_ranks=8, num_blocks=170)
    assert len(state.layers) > 1000
    view = grid_view(state, facts)
    assert len(view["rows"]) == 5 and view["find"]["shown"]


def test_the_chain_of_bytes_is_that_of_boxing_plans():
    resolved = Strategy("fc1: data; fc2: model").resolve(MLP, 2)
    placement = Placement.of("cpu", resolved.stage_grid(0))
    plan = plan_boxing(Layout.of(placement, ("B", "S(0)")), Layout.of(placement, ("B", "B")), (128, 256), itemsize=4)
    step = edges_of(MLP, resolved, of_linear_layers(MLP, (64,)), 128)[1]
    assert step.forward_bytes == plan.wire_bytes
    assert ShardingPlan(MLP, resolved).placements[0].shape == (2,), "an axis of one rank is left out"


@pytest.mark.parametrize("strategy", [GPT_HYBRID, "*: model | 1x2x2", "hybrid", "*: model:row | sequence", "pipeline"])
def test_what_arrives_is_what_was_sent(strategy: str):
    layers = gpt(8).layers
    resolved = PanelState(layers, 4, strategy).resolved
    steps = edges_of(layers, resolved, traced(layers, gpt(8).rows, (64,)), 8)
    plans = {plan for step in steps for plan in (*step.plans, *step.backward_plans)}
    assert plans
    for plan in plans:
        assert wire_bytes(plan) == plan.wire_bytes, plan.title


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("data", 4),
        ("model", 4),
        (GPT_HYBRID, 4),
        ("blocks: model; *_emb: data; ln_f: data; lm_head: data | 1x2x2", 4),
        ("*: data; blocks.[4-7]: data@1; ln_f: data@1; lm_head: data@1 | 2x2x1 mb=2", 4),
        ("*: model | sequence", 2),
        ("*: model | 1x4x2 zero=2 shards=2 mb=2", 8),
    ],
)
def test_the_panel_and_the_cost_model_count_the_same_bytes(strategy: str, num_ranks: int):
    state, facts = gpt_state(strategy, num_ranks)
    way = boxings_of(state, facts)
    shown = way.num_micro_batches * way.bytes_per_micro_batch + sum(way.gradient_bytes)
    assert shown == pytest.approx(estimate(gpt(), state.resolved, load_hardware("v100-dgx1"), 32).boxed_bytes, rel=1e-9)


def test_a_choice_without_effect_is_said_at_its_row():
    state, facts = gpt_state("*: model", num_ranks=2, num_blocks=2)
    norm = row(grid_view(state, facts), "ln_f")
    assert norm["hint"] == "not split" and "every rank holds all of this layer's weights" in norm["hint_tip"]
    assert norm["boxings"]["note"].startswith("not split")
    assert row(grid_view(state, facts), "lm_head")["hint"] == ""
    folded = next(entry for entry in grid_view(state, facts)["rows"] if entry["open"] is False)
    assert folded["hint"] == "", "some of its layers are split"
    assert "model, not split" in static_grid_html(grid_view(state, facts))
