"""The live figure and the view around it, without a browser or engines."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.ui.live_figures import MEMORY, marks, titles, trace
from tests.ui.reports import block, spans
from workbench.theme import LIGHT
from workbench.ui.live import figure_layout as figure_layout
from workbench.ui.live import live_figure
from workbench.ui.live import overlays as overlays
from workbench.ui.live.history import Change, History
from workbench.ui.live.timeline_bars import timeline_bars

# ---- the figure -----------------------------------------------------------------------------------------------------


def test_what_was_reported_is_put_into_the_figure():
    figure = live_figure.empty_figure(2, 10)
    history = History(10, 2)
    history.add([block(0, (2.0,), memory=MEMORY)])
    live_figure.show_curves(figure, history)
    live_figure.show_memory(figure, history)
    live_figure.show_split(figure, history.split, history.boxed_bytes)
    assert list(trace(figure, "throughput, newest").y) == pytest.approx([500])
    assert list(trace(figure, "this run, newest").y) == [2.0]
    assert list(trace(figure, "parameters").x) == [2.0, 2.0]
    assert list(trace(figure, "peak in words").text) == ["\u20024.00 MB", "\u20024.00 MB"]
    assert list(trace(figure, "boxing").x) == pytest.approx([40, 20])
    assert trace(figure, "boxing").text[0] == "40 %"
    assert figure.layout.xaxis3.ticksuffix == " MB"
    assert "500 samples/s now" in titles(figure)[0] and "1.00 kB boxed per step" in titles(figure)[3]


def test_a_timeline_has_a_row_per_rank_measured_above_simulated():
    figure = live_figure.empty_figure(2, 10)
    live_figure.show_timeline(figure, timeline_bars([spans(0), spans(1)]))
    forward = trace(figure, "forward, measured")
    assert list(forward.base) == [0.0, 1.0] and list(forward.x) == [0.75, 0.75] and list(forward.text) == ["F0", "F0"]
    assert list(trace(figure, "forward, simulated").base) == [0.0, 0.75]
    assert (np.array(trace(figure, "forward, simulated").y) > np.array(forward.y)).all()
    assert list(trace(figure, "idle").x) == [6.5, 6.5]
    assert figure.layout.xaxis5.ticksuffix == " s" and "Timeline, step 1" in titles(figure)[4]


def test_every_trace_has_a_name_of_its_own():
    names = [trace.name for trace in live_figure.empty_figure(2, 10).data]
    assert len(set(names)) == len(names), "traces are found by their names"


def test_short_bars_have_no_label():
    figure = live_figure.empty_figure(2, 10)
    long = timeline_bars([spans(0), spans(1)])
    long.measured["forward"].length_s[0] = 0.01
    live_figure.show_timeline(figure, long)
    assert list(trace(figure, "forward, measured").text) == ["", "F0"]


def test_a_change_of_strategy_is_a_line_in_both_curves_with_names():
    figure = live_figure.empty_figure(2, 10)
    overlays.show_changes(figure, [Change(3, "data", "hybrid")])
    overlays.show_changes(figure, [Change(3, "data", "hybrid"), Change(8, "hybrid", "model")])
    lines = [(shape.x0, shape.xref) for shape in marks(figure, "shapes", "change")]
    assert lines == [(3, "x"), (3, "x2"), (8, "x"), (8, "x2")]
    assert [note.text for note in marks(figure, "annotations", "change")] == ["hybrid \u2192 model"]
    overlays.show_changes(figure, [Change(5, "data", "hybrid")])
    assert [note.text for note in marks(figure, "annotations", "change")] == ["data", "hybrid"]


def test_marks_leave_each_other_alone():
    figure = live_figure.empty_figure(4, 10)
    num_notes = len(figure.layout.annotations)
    overlays.show_stages(figure, [(0, 0), (0, 1), (1, 0), (1, 1)])
    overlays.show_limit(figure, 3.0, 3e6)
    overlays.show_pause(figure, True)
    assert [shape.fillcolor for shape in marks(figure, "shapes", "stages")] == [
        LIGHT.rank_colour(stage, position) for stage in (0, 1) for position in (0, 1)
    ]
    (limit,), (label,) = marks(figure, "shapes", "limit"), marks(figure, "annotations", "limit")
    assert limit.x0 == 3.0 and limit.line.color == LIGHT.error and label.text == "limit 3.00 MB"
    assert [note.xref for note in marks(figure, "annotations", "pause")] == ["x domain", "x2 domain"]
    overlays.show_limit(figure, None, 0)
    overlays.show_pause(figure, False)
    overlays.show_stages(figure, [])
    assert len(figure.layout.shapes) == 0 and len(figure.layout.annotations) == num_notes


def test_a_near_limit_is_a_line_and_a_far_one_a_number():
    history = History(10, 2)
    history.add([block(0, (2.0,), memory=MEMORY)])
    figure = live_figure.empty_figure(2, 10)
    overlays.show_limit(figure, live_figure.show_memory(figure, history, LIGHT, 8e6), 8e6)
    assert figure.layout.xaxis3.range[1] > 8.0
    assert [line.x0 for line in marks(figure, "shapes", "limit")] == [8.0]
    assert [note.text for note in marks(figure, "annotations", "limit")] == ["limit 8.00 MB"]
    overlays.show_limit(figure, live_figure.show_memory(figure, history, LIGHT, 24e9), 24e9)
    assert figure.layout.xaxis3.range[1] == 6.0 and marks(figure, "shapes", "limit") == []
    assert [note.text for note in marks(figure, "annotations", "limit")] == ["limit 24.0 GB \u2192"]


def test_axes_grow_with_the_run():
    figure = live_figure.empty_figure(2, 1000)
    for last_step, end in ((15, 20), (222, 300), (999, 1000)):
        live_figure.show_steps(figure, last_step, 1000)
        assert figure.layout.xaxis.range[1] == figure.layout.xaxis2.range[1] == end


def test_a_prediction_is_dashed_from_where_it_was_made():
    figure = live_figure.empty_figure(2, 10)
    live_figure.show_expected(figure, 10, 500.0)
    live_figure.show_expected(figure, 10, 400.0, from_step=6)
    assert list(trace(figure, "predicted").x) == [0, 6, 6, 10] and list(trace(figure, "predicted").y) == [
        500,
        500,
        400,
        400,
    ]
    history = History(10, 2)
    history.add([block(0, (2.0,), memory=MEMORY)])
    live_figure.show_memory(figure, history, expected_bytes=[3e6, 5e6])
    assert list(trace(figure, "predicted peak").x) == [3.0, 5.0]
    assert list(trace(figure, "peak in words").x) == [4.0, 5.0], "right of both ticks"


def test_every_axis_has_a_unit_and_all_parts_have_places_of_their_own():
    layout = live_figure.empty_figure(4, 10).layout
    assert layout.width == 1176 and layout.height == figure_layout.WIDE.height(4)
    assert layout.xaxis.tickprefix == layout.xaxis2.tickprefix == "step "
    assert layout.xaxis4.ticksuffix == " %"
    lefts = [layout[f"xaxis{n}"].domain for n in ("", 2, 3, 4)]
    assert all(a[1] < b[0] for a, b in pairwise(lefts))
    assert layout.yaxis5.domain[1] < layout.yaxis.domain[0]


@pytest.mark.parametrize(("num_ranks", "rows"), [(2, 2), (16, 16), (64, 16)])
def test_many_ranks_share_sixteen_rows(num_ranks: int, rows: int):
    shown = figure_layout.shown_ranks(num_ranks)
    assert len(shown) == rows == len(set(shown)) and max(shown) < num_ranks
    figure = live_figure.empty_figure(num_ranks, 10)
    history = History(10, num_ranks)
    history.add([block(time_s=(0.1,) * num_ranks, boxing_s=(0.01,) * num_ranks, memory=(MEMORY[0],) * num_ranks)])
    live_figure.show_memory(figure, history)
    assert len(trace(figure, "parameters").x) == rows
