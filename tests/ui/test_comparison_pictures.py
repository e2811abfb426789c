"""Below the table of runs: predictions against measurements, and time by layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from tests.ui.conftest import make_record
from workbench.core.metrics import RunRecord
from workbench.session.comparison.compare import CompareResult
from workbench.ui.pictures.svg import text_width
from workbench.ui.runs.detail_pictures import layer_times, layers_picture, memory_picture, prediction_picture
from workbench.ui.runs.render_table import rows_table_html
from workbench.ui.runs.report import report_html
from workbench.ui.runs.scatter_picture import place_labels, scatter_picture
from workbench.ui.runs.table_rows import run_rows
from workbench.ui.runs.table_widget import RunTable
from workbench.ui.short_names import short_name

FORWARD = {"h.0.fc": 0.01, "h.1.fc": 0.02, "head": 0.06}
BACKWARD = {"h.0.fc": 0.02, "h.1.fc": 0.04, "head": 0.12}


def predicted(name: str, predicted_s: float, **changes: object) -> RunRecord:
    """A run whose step takes 20 ms."""
    return make_record(name, predicted={"step_s": predicted_s, "samples_per_s": 100 / predicted_s}, **changes)


def centres(html: str) -> list[tuple[float, float]]:
    found = re.findall(r'class="hollow" cx="([\d.]+)" cy="([\d.]+)"', html)
    return [(float(x), float(y)) for x, y in found]


def test_a_run_as_predicted_lies_on_the_line():
    rows = run_rows([predicted("data", 0.02), predicted("model", 0.1)])
    html = prediction_picture(rows)
    line = re.search(r'<line class="even" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', html)
    assert line is not None
    left, bottom, right, top = map(float, line.groups())
    (x, y), (slow_x, slow_y) = centres(html)
    assert (x - left) / (right - left) == pytest.approx((bottom - y) / (bottom - top), rel=0.01)
    assert (slow_x - left) / (x - left) == pytest.approx(5, rel=0.01), "predicted to take five times as long"
    assert slow_y == y, "measured to take as long"
    assert "model +400 %" in html


def test_without_predictions_there_is_no_picture(runs: list[RunRecord]):
    assert prediction_picture(run_rows(runs)) == ""
    assert layers_picture(runs, {}) == ""


def test_layers_of_equal_blocks_are_one_row():
    run = make_record("data", layer_forward_s=FORWARD, layer_backward_s=BACKWARD)
    times = layer_times(run)
    assert list(times) == ["h.*.fc \u00d72", "head"]
    assert times["h.*.fc \u00d72"].forward_s == pytest.approx(0.03)
    assert times["head"].total_s == pytest.approx(0.18)


def test_of_many_layers_the_slowest_are_drawn_in_the_model_s_order():
    seconds = {f"{letter}": 0.01 * number for number, letter in enumerate("abcdefghijkl", 1)}
    html = layers_picture([make_record("data", layer_forward_s=seconds)], {})
    names = [name for name in seconds if f">{name}<" in html]
    assert names == list("cdefghijkl") and "2 faster layers not shown" in html
    assert [html.index(f">{name}<") for name in names] == sorted(html.index(f">{name}<") for name in names)


def test_a_layer_s_time_is_its_own():
    forward = {"(root)": 1.0, "h.0": 0.5, "h.0.fc": 0.4, "head": 0.2}
    times = layer_times(make_record("data", layer_forward_s=forward))
    own = {name: round(layer.forward_s, 6) for name, layer in times.items()}
    assert own == {"(root)": 0.3, "h.0": 0.1, "h.0.fc": 0.4, "head": 0.2}


def test_long_names_of_layers_are_not_cut_where_there_is_room():
    name = "encoder.layer.attention.output.dense"
    assert f">{name}<" in layers_picture([make_record("data", layer_forward_s={name: 0.1})], {})


def test_layers_are_bars_in_the_model_s_order_a_column_per_run():
    fast = {name: seconds / 2 for name, seconds in FORWARD.items() if name != "head"}
    runs = [
        make_record("data", layer_forward_s=FORWARD, layer_backward_s=BACKWARD),
        make_record("model", layer_forward_s=fast, layer_backward_s={}),
    ]
    html = layers_picture(runs, {"model": "my model"})
    assert html.index(">h.*.fc \u00d72<") < html.index(">head<")
    assert ">my model<" in html
    lengths = [float(share) for share in re.findall(r"calc\(\(100% - 56px\) \* ([\d.]+)\)", html)]
    assert lengths == pytest.approx([0.5, 0.0833, 1.0], abs=1e-3), "90 ms, 15 ms of the other run, 180 ms"
    assert re.findall(r"width: ([\d.]+)%; background: var\(--wb-(\w+)\)", html)[:2] == [
        ("33.33", "forward"),
        ("66.67", "backward"),
    ]
    assert "\u2013" in html, "the other run has no head"


def bars(html: str) -> list[list[tuple[str, float]]]:
    """Colour and width of the bars of every rank."""
    found = [
        [(rect.attrib["style"].removeprefix("fill: "), float(rect.attrib["width"])) for rect in group.findall("rect")]
        for group in ElementTree.fromstring(html).iter("g")
    ]
    return [each for each in found if each]


def test_memory_is_a_bar_per_rank_by_kind_up_to_its_peak(runs: list[RunRecord], baseline: RunRecord):
    html = memory_picture([*runs, baseline], {"data": "my data"}, "data")
    first, second, *others, alone = bars(html)
    assert [colour for colour, _ in second] == [
        *(f"var(--wb-memory-{kind})" for kind in ("parameters", "gradients", "optimizer", "activations", "buffers")),
        "var(--wb-idle)",
    ]
    unit = first[0][1]
    assert [width / unit for _, width in first] == pytest.approx([1, 1, 1, 2, 1], rel=0.01), "5 MB live of 6"
    assert [width / unit for _, width in second] == pytest.approx([1, 1, 1, 2, 0.5, 2.5], rel=0.01)
    assert [width / unit for _, width in alone] == pytest.approx([2, 7], rel=0.01) and len(others) == 2
    assert "my data, rank 1: parameters 1.00 MB" in html and "peak 8.00 MB</title>" in html
    assert '<text class="strong"' in html and "pipeline" not in html, "it failed"
    assert "boxing buffers" in html and "other, up to the peak" in html


def test_of_many_ranks_the_fullest_is_drawn():
    sizes = tuple(range(1_000_000, 9_000_000, 1_000_000))
    runs = [make_record(f"run {n}", num_ranks=8, peak_memory_bytes=sizes, memory_by_kind=({},) * 8) for n in range(3)]
    html = memory_picture(runs, {})
    assert len(bars(html)) == 3 and html.count(">rank 7<") == 3 and "on the fullest rank" in html
    assert len(bars(memory_picture(runs[:2], {}))) == 16


def test_memory_that_is_known_in_part_is_drawn():
    peaks = make_record("peaks", memory_by_kind=())
    live = make_record("live", peak_memory_bytes=())
    assert [len(rank) for rank in bars(memory_picture([peaks, live], {}))] == [1, 1, 5, 6]
    assert memory_picture([make_record("none", peak_memory_bytes=(), memory_by_kind=())], {}) == ""
    larger = memory_picture([make_record("larger", peak_memory_bytes=(1, 1))], {})
    assert all(0 <= width < 346 for rank in bars(larger) for _, width in rank), "live memory is above the peak"


def test_differences_to_a_chosen_baseline_stand_below_the_numbers(runs: list[RunRecord]):
    rows = run_rows(runs, baseline="model")
    data = next(row for row in rows if row.name == "data")
    assert data.changes["peak_bytes"] == "+100 %"
    assert data.changes["samples_per_s"] == "+67 %"
    assert next(row for row in rows if row.name == "model").changes == {}
    html = rows_table_html(rows)
    assert "<span>8.00 MB</span><small>+100 %</small>" in html
    assert "<small>+" not in rows_table_html(run_rows(runs))


def test_the_table_and_its_exports_have_the_pictures():
    run = replace(predicted("data", 0.03), layer_forward_s=FORWARD, layer_backward_s=BACKWARD)
    table = RunTable()
    table.add([run])
    for html in (table.page.page, table.static_html(), table.exported("html"), report_html(CompareResult(None, [run]))):
        assert "Prediction against measurement" in html
        assert "Time by layer" in html
    table.select("data")
    assert table.page.page.count("wb-ring") == 2, "in the scatter, and among the predictions"


def test_exports_have_the_names_that_were_given():
    table = RunTable()
    table.add([predicted("data", 0.03)])
    table.rename("data", "my favourite")
    assert all("my favourite" in table.exported(kind) for kind in ("csv", "json", "html"))


def test_names_never_cover_points_or_each_other():
    points = [(50.0, 50.0), (54.0, 52.0), (58.0, 50.0), (50.0, 52.0)]
    placed = place_labels([(f"strategy {n}", point) for n, point in enumerate(points)], points, (0.0, 300.0))
    assert 0 < len(placed) <= 4
    assert len({(x, y) for x, y, *_ in placed}) == len(placed)
    assert place_labels([("a name that is far too long", (5.0, 5.0))], [(5.0, 5.0)], (0.0, 20.0)) == []


def test_names_keep_off_lines_where_there_is_room():
    """The last one has none, and is written across a line."""
    point, line = (30.0, 50.0), (30.0, 50.0, 300.0, 50.0)
    [(x, y, anchor, _)] = place_labels([("a long name", point)], [point], (0.0, 300.0), lines=[line])
    assert (x, anchor) == (pytest.approx(text_width("a long name") / 2 + 1), "middle") and y < 45, (
        "above the line, and moved in from the edge"
    )
    around = [(0.0, y, 300.0, y) for y in range(20, 90, 10)]
    assert len(place_labels([("a long name", point)], [point], (0.0, 300.0), lines=around)) == 1


def lines_of(svg: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """The pieces of the Pareto line, the axis, error bars and the limit."""
    found = [
        tuple(float(line.attrib[name]) for name in ("x1", "y1", "x2", "y2"))
        for line in svg.iter("line")
        if line.get("class") != "rule"
    ]
    for path in svg.iter("path"):
        numbers = [float(number) for number in path.attrib["d"].strip("M").split()]
        corners = list(zip(numbers[::2], numbers[1::2], strict=True))
        found += [(*start, *stop) for start, stop in pairwise(corners)]
    return found  # type: ignore[return-value]


def crossed(svg: ElementTree.Element, names: Sequence[str]) -> list[str]:
    """The names that a line crosses."""
    found = []
    for text in svg.iter("text"):
        if text.text in names:
            x, y, width = float(text.attrib["x"]), float(text.attrib["y"]), text_width(text.text, 12)
            css = text.get("class", "").split()
            left = x - (width if "end" in css else width / 2 if "middle" in css else 0)
            found += [
                text.text
                for x1, y1, x2, y2 in lines_of(svg)
                if min(x1, x2) < left + width and max(x1, x2) > left and min(y1, y2) < y and max(y1, y2) > y - 9
            ]
    return found


@pytest.mark.parametrize(
    "places",
    [
        {"*: data; h: model": (31, 480), "one device": (34, 540)},
        {"*: data": (40, 900), "*: model": (32, 500), "pipeline | mb=4 1f1b": (28, 410), "one device": (42, 150)},
        {"*: data": (40, 900), "*: data | zero=3": (30, 880), "hybrid": (30.5, 300), "*: model": (44, 910)},
    ],
)
def test_no_line_crosses_a_name_of_few_runs(places: dict[str, tuple[float, float]]):
    runs = [
        make_record(name, samples_per_s=float(rate), peak_memory_bytes=(int(memory * 1e6),))
        for name, (memory, rate) in places.items()
    ]
    svg = ElementTree.fromstring(scatter_picture(run_rows(runs), limit_bytes=46e6))
    names = [short_name(name) for name in places]
    assert {text.text for text in svg.iter("text")} >= set(names), "all have room"
    assert crossed(svg, names) == []
