"""Memory against throughput: the front, the labels, the values."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ui.conftest import make_record
from workbench.core.metrics import RunRecord
from workbench.ui.runs.scatter_figure import label_places, pareto_front, scatter_figure


@pytest.mark.parametrize(
    ("memory", "rate", "front"),
    [
        ([], [], []),
        ([1], [1], [0]),
        ([3, 1, 2, 2], [9, 5, 4, 7], [1, 3, 0]),
        ([1, 1], [5, 5], [0]),
        ([1, 2, 3], [3, 2, 1], [0]),
    ],
)
def test_the_front_holds_what_nothing_beats(memory: list[int], rate: list[int], front: list[int]):
    assert pareto_front(memory, rate) == front


def test_points_are_the_largest_rank_and_pareto_points_are_filled(runs: list[RunRecord], baseline: RunRecord):
    figure = scatter_figure(runs, baseline)
    line, points, device = figure.data
    assert list(points.x) == [8.0, 4.0] and list(points.y) == [5000, 3000]
    assert list(points.text) == ["data", "model"]
    assert list(line.x) == [4.0, 8.0], "by memory"
    assert points.marker.color[0] == points.marker.color[1], "both are on the front"
    assert list(device.x) == [9.0] and device.marker.symbol == "square"
    assert "MB" in figure.layout.xaxis.title.text and "samples/s" in figure.layout.yaxis.title.text


def test_labels_of_close_points_go_to_different_sides():
    x, y = np.array([1.0, 1.01, 9.0]), np.array([1.0, 1.0, 9.0])
    assert label_places(["data", "model", "hybrid"], x, y) == ["top center", "bottom center", "top center"]
    close = np.array([2.77, 2.61, 3.8, 8.5]), np.array([33976.0, 28897.0, 14379.0, 57113.0])
    assert label_places(["hybrid", "model", "pipeline", "1 device"], *close)[:2] == ["top center", "bottom center"]


def test_a_label_without_room_is_left_to_the_hover(baseline: RunRecord):
    same = [make_record(f"run {number}") for number in range(9)]
    _, points, _ = scatter_figure(same, baseline).data
    assert "" in points.text and list(points.hovertext) == [run.name for run in same]
