"""What the grid draws: slices, boxings and bytes are those of the core, for every kind of strategy."""

from __future__ import annotations

import json

import pytest

from workbench.core.strategy import Layer
from workbench.ui.placing import Degrees, sbp_text, stage_placement, walk
from workbench.ui.state import PanelState
from workbench.ui.view import GridState, grid_view, parameters_held

LAYERS = [
    Layer("fc1", "Linear", {"weight": (256, 64), "bias": (256,)}, 16640),
    Layer("fc2", "Linear", {"weight": (256, 256), "bias": (256,)}, 65792),
    Layer("fc3", "Linear", {"weight": (128, 256), "bias": (128,)}, 32896),
    Layer("head", "Linear", {"weight": (10, 128), "bias": (10,)}, 1290),
]


def view_of(strategy: str, num_ranks: int = 2, batch_size: int = 128, sample_shape: tuple[int, ...] = (64,)) -> dict:
    state = PanelState(LAYERS, num_ranks, strategy)
    return grid_view(
        GridState(
            layers=LAYERS,
            choices=state.choices,
            drawn=state.drawn,
            degrees=state.degrees,
            batch_size=batch_size,
            num_micro_batches=state.options.num_micro_batches,
            sample_shape=sample_shape,
            mistakes=state.mistakes,
        )
    )


def row(view: dict, name: str) -> dict:
    return next(row for row in view["rows"] if row["name"] == name)


def test_view_travels_as_json():
    assert json.loads(json.dumps(view_of("hybrid"))) == view_of("hybrid")


def test_data_parallel_ranks_hold_the_whole_weight():
    fc1 = row(view_of("data"), "fc1")
    assert fc1["weight"] == "256 \u00d7 64" and fc1["params"] == "16.6 k" and fc1["sbp"] == "B"
    for held in fc1["slices"]:
        assert held["text"] == "all of 256 \u00d7 64"
        assert [(part["x"], part["y"], part["w"], part["h"]) for part in held["parts"]] == [(0, 0, 1, 1)]


def test_column_is_a_band_of_rows_and_row_a_band_of_columns():
    view = view_of("hybrid")
    column, by_row = row(view, "fc3"), row(view, "head")
    assert column["sbp"] == "S(0)" and by_row["sbp"] == "S(1)"
    assert [held["text"] for held in column["slices"]] == ["rows 0-63 of 128", "rows 64-127 of 128"]
    assert [held["text"] for held in by_row["slices"]] == ["columns 0-63 of 128", "columns 64-127 of 128"]
    assert column["slices"][1]["parts"][0] == {"x": 0.0, "y": 0.5, "w": 1.0, "h": 0.5, "shade": 1}
    assert by_row["slices"][1]["parts"][0] == {"x": 0.5, "y": 0.0, "w": 0.5, "h": 1.0, "shade": 1}


def test_a_stage_holds_its_layers_alone():
    view = view_of("pipeline")
    assert [stage["label"] for stage in view["stages"]] == ["stage 0", "stage 1"]
    for entry in view["rows"]:
        held = [part is not None for part in entry["slices"]]
        assert held == [entry["stage"] == 0, entry["stage"] == 1]


def test_boxings_between_layers_have_kind_and_bytes():
    flows = {entry["name"]: entry["flow"] for entry in view_of("hybrid")["rows"]}
    assert flows["fc1"]["boxing"] is None and flows["fc2"]["boxing"] is None
    boxing = flows["fc3"]["boxing"]
    assert (boxing["change"], boxing["kind"]) == ("S(0) \u2192 B", "all-gather")
    assert boxing["bytes"] == "131 kB", "(p-1) |T| = 128 x 256 x 4 bytes"
    assert flows["head"]["boxing"] is None, "column to row needs nothing"
    assert flows["fc1"]["note"].startswith("grad P \u2192 B 133 kB"), "2 (p-1) |W| = 2 x 16640 x 4 bytes"
    assert flows["fc3"]["note"] == ""


def test_stages_send_and_micro_batches_make_it_less():
    boxing = next(entry["flow"]["boxing"] for entry in view_of("pipeline")["rows"] if entry["flow"]["boxing"])
    assert boxing["change"] == "0 \u2192 1" and boxing["kind"] == "send"
    assert boxing["bytes"] == "32.8 kB", "128 / 4 samples x 256 features x 4 bytes"


def test_partial_sums_are_summed_where_they_arise():
    steps = walk(LAYERS, PanelState(LAYERS, 2, "*: model:row").drawn, Degrees(1, 1, 2), 128, (64,))
    assert [[plan.kind for plan in step.boxings] for step in steps[1:]] == [["all-reduce", "slice"]] * 3


def test_bytes_are_not_guessed_where_shapes_are_unknown():
    view = view_of("hybrid", sample_shape=(3, 8, 8))
    assert row(view, "fc3")["flow"]["boxing"]["bytes"] == ""


def test_parameters_held_add_up():
    whole = 4 * sum(layer.num_parameters for layer in LAYERS)
    held = {name: PanelState(LAYERS, 2, name) for name in ("data", "pipeline", "model")}
    sizes = {name: parameters_held(LAYERS, state.drawn, state.degrees) for name, state in held.items()}
    assert sizes["data"] == [whole, whole]
    assert sum(sizes["pipeline"]) == whole
    bias_of_row_split_layers = 4 * (256 + 10)
    assert sum(sizes["model"]) == whole + bias_of_row_split_layers


def test_a_mistake_is_at_its_row_with_its_fix_and_the_last_picture():
    state = PanelState(LAYERS, 2, "pipeline")
    state.set_stage(["head"], 0)
    view = grid_view(
        GridState(LAYERS, state.choices, state.drawn, state.degrees, 128, mistakes=state.mistakes, sample_shape=(64,))
    )
    head = row(view, "head")
    assert head["bad"] == "stage" and head["kept"] and head["stage"] == 0 and head["drawn_stage"] == 1
    assert head["mistakes"][0]["fixes"] == [{"label": "use stage 1", "value": "use stage 1"}]
    assert not row(view, "fc1")["mistakes"]


@pytest.mark.parametrize(("num_ranks", "num_columns"), [(1, 1), (2, 2), (8, 8), (9, 1), (64, 1)])
def test_columns_fit_whatever_the_number_of_ranks(num_ranks: int, num_columns: int):
    view = view_of("data", num_ranks)
    assert len(view["columns"]) == num_columns
    assert view["ranks_width"] <= 334
    centres = [column["centre"] for column in view["columns"]]
    assert centres == sorted(centres) and centres[-1] < view["ranks_width"]


def test_many_ranks_show_all_slices_in_one_picture():
    held = row(view_of("model", 16), "fc2")["slices"][0]
    assert len(held["parts"]) == 16 and held["text"] == "16 slices on 16 ranks"
    assert sum(part["w"] * part["h"] for part in held["parts"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("degrees", "stage", "grid", "text"),
    [
        (Degrees(1, 2, 1), 0, (0, 1), "B"),
        (Degrees(2, 2, 2), 1, (4, 5, 6, 7), "B"),
        (Degrees(1, 1, 1), 0, (0,), "B"),
    ],
)
def test_stages_are_consecutive_ranks(degrees: Degrees, stage: int, grid: tuple[int, ...], text: str):
    placement = stage_placement(degrees, stage)
    assert placement.grid == grid and placement.shape == (degrees.data, degrees.model)
    from workbench.core.layout import Layout

    assert sbp_text(Layout.of(placement, ("B", "B"))) == text


def test_rows_with_note_and_badge_have_room_for_both():
    heights = [entry["height"] for entry in view_of("hybrid")["rows"]]
    assert heights == [32, 40, 32, 32]
