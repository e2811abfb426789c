"""Every number in a figure is the number of the run; every axis says its unit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest

from workbench.core.metrics import RunRecord
from workbench.theme import DARK, LIGHT
from workbench.ui.run_figures import (
    comparison_figure,
    loss_difference_figure,
    loss_figure,
    memory_figure,
    throughput_figure,
)


def trace_of(figure: go.Figure, name: str, mode: str | None = None) -> go.Scatter | go.Bar:
    """The one trace with this name (and drawing mode)."""
    found = [trace for trace in figure.data if trace.name == name and (mode is None or trace.mode == mode)]
    assert len(found) == 1, f"{name}: {[(trace.name, trace.type) for trace in figure.data]}"
    return found[0]


def axis_titles(figure: go.Figure) -> tuple[str, str]:
    return figure.layout.xaxis.title.text, figure.layout.yaxis.title.text


def test_more_runs_than_steps_have_a_mark_each(runs: list[RunRecord]):
    many = [replace(runs[0], name=f"run {number}") for number in range(5)]
    assert all(len(trace_of(loss_figure(many), run.name, "markers").x) for run in many), "the legend shows the marks"


def test_loss_by_step_with_one_device_behind(runs: list[RunRecord], baseline: RunRecord):
    figure = loss_figure(runs, [baseline])
    assert figure.data[0].name == "1 device" and figure.data[0].line.width > 5
    curve = trace_of(figure, "model", "lines")
    assert list(curve.x) == [1, 2, 3] and list(curve.y) == [2.0, 1.5 + 1e-6, 1.0]
    assert axis_titles(figure) == ("step", "loss")


def test_failed_runs_are_not_drawn(runs: list[RunRecord], baseline: RunRecord):
    assert "pipeline" not in {trace.name for trace in loss_figure(runs, [baseline]).data}


def test_markers_of_equal_curves_sit_at_different_steps(baseline: RunRecord):
    equal = [RunRecord(f"run {i}", "", 1, 1, losses=tuple(range(40))) for i in range(4)]
    figure = loss_figure(equal)
    marked = [set(trace_of(figure, run.name, "markers").x) for run in equal]
    assert all(marked) and len(set.union(*marked)) == sum(map(len, marked))


def test_difference_to_one_device_is_drawn_with_its_limit(runs: list[RunRecord], baseline: RunRecord):
    figure = loss_difference_figure(runs, [baseline])
    curve = trace_of(figure, "model", "lines")
    assert list(curve.x) == [2], "exact zeros cannot be drawn on a logarithmic axis"
    assert curve.y[0] == pytest.approx(1e-6 / 1.5, rel=1e-6)
    assert figure.layout.shapes[0].y0 == 1e-5
    assert figure.layout.annotations[0].text == "limit 1e-5"
    assert figure.layout.annotations[0].y == -5
    assert figure.layout.yaxis.ticktext[0] == "1e-7"


def test_differences_of_large_losses_are_relative(runs: list[RunRecord], baseline: RunRecord):
    large = [replace(run, losses=tuple(1000 * loss for loss in run.losses)) for run in (runs[1], baseline)]
    curve = trace_of(loss_difference_figure(large[:1], large[1:]), "model", "lines")
    assert curve.y[0] == pytest.approx(1e-6 / 1.5, rel=1e-6)


def test_throughput_is_batch_over_step_time(runs: list[RunRecord]):
    figure = throughput_figure(runs)
    assert list(trace_of(figure, "data", "lines").y) == pytest.approx([10000, 5000, 4000])
    assert axis_titles(figure) == ("step", "samples/s")


def test_memory_is_stacked_by_kind_with_the_peak_as_tick(runs: list[RunRecord]):
    figure = memory_figure(runs[:1])
    assert list(trace_of(figure, "activations").x) == [2.0, 2.0]
    assert list(trace_of(figure, "boxing buffers").x) == [0.0, 0.5]
    peak = trace_of(figure, "peak of the process")
    assert list(peak.x) == [6.0, 8.0] and list(peak.text) == ["6.00 MB", "8.00 MB"]
    assert list(peak.y) == ["rank 0", "rank 1"]
    assert figure.layout.barmode == "stack" and axis_titles(figure)[0] == "MB"


def test_memory_of_several_runs_is_labelled_by_run_and_rank(runs: list[RunRecord]):
    labels = memory_figure(runs).data[0].y
    assert [tuple(pair) for pair in zip(*labels, strict=True)] == [
        ("data", "rank 0"),
        ("data", "rank 1"),
        ("model", "rank 0"),
        ("model", "rank 1"),
    ]


def test_comparison_is_sorted_with_one_device_last(runs: list[RunRecord], baseline: RunRecord):
    bars, texts = comparison_figure([runs[1], runs[0]], baseline).data
    assert list(bars.y) == ["data", "model", "1 device"]
    assert list(bars.x) == [5000, 3000, 4000]
    assert list(texts.x) == list(bars.x) and not bars.error_x.visible
    assert texts.text[0] == " 5\u202f000 (1.25\u00d7)"
    assert bars.marker.color[2] != bars.marker.color[0]


def with_seed(run: RunRecord, seed: int, **changes: object) -> RunRecord:
    return replace(run, name=f"{run.name}, seed {seed}", settings={"seed": seed}, **changes)


def test_several_seeds_have_one_colour_and_one_name(runs: list[RunRecord], baseline: RunRecord):
    seeds = [with_seed(run, seed) for seed in (0, 1) for run in runs[:2]]
    figure = loss_figure(seeds, [with_seed(baseline, seed) for seed in (0, 1)])
    lines = [trace for trace in figure.data if trace.mode == "lines" and trace.name == "data"]
    assert len(lines) == 2 and len({trace.line.color for trace in lines}) == 1
    assert [trace.name for trace in figure.data if trace.showlegend] == ["1 device", "data", "model"]


def test_differences_are_to_one_device_of_the_same_seed(runs: list[RunRecord], baseline: RunRecord):
    other = with_seed(baseline, 1, losses=(3.0, 2.5, 2.0))
    run = with_seed(runs[0], 1, losses=(3.0, 2.5 + 1e-6, 2.0))
    curve = trace_of(loss_difference_figure([run], [with_seed(baseline, 0), other]), "data, seed 1", "lines")
    assert list(curve.x) == [2] and curve.y[0] == pytest.approx(1e-6 / 2.5, rel=1e-6)


def test_the_bars_of_several_seeds_have_error_bars(runs: list[RunRecord], baseline: RunRecord):
    mean = replace(runs[0], spread={"samples_per_s": 250.0})
    bars, texts = comparison_figure([mean, runs[1]], baseline).data
    assert list(bars.error_x.array) == [250, 0, 0] and bars.error_x.visible
    assert texts.text[0] == " 5\u202f000 \u00b1 250 (1.25\u00d7)" and list(texts.x) == [5250, 3000, 4000]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=lambda colours: colours.name)
def test_figures_use_the_theme_and_numpy(colours, runs: list[RunRecord], baseline: RunRecord):
    figures = [
        loss_figure(runs, [baseline], colours),
        throughput_figure(runs, colours),
        memory_figure(runs, colours),
        comparison_figure(runs, baseline, colours),
    ]
    for figure in figures:
        assert figure.layout.font.color == colours.ink
        assert figure.layout.paper_bgcolor == "rgba(0,0,0,0)"
        assert all(isinstance(trace.x, np.ndarray) for trace in figure.data)


def test_figures_of_nothing_are_empty_not_errors(baseline: RunRecord):
    for figure in (
        loss_figure([]),
        throughput_figure([]),
        memory_figure([]),
        comparison_figure([]),
    ):
        assert isinstance(figure, go.Figure)
    assert isinstance(loss_difference_figure([], [baseline]), go.Figure)
