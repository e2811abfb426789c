"""Losses and throughput of several runs over one another, in the comparison."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.ui.conftest import make_record
from workbench.core.metrics import RunRecord, Segment
from workbench.core.segments import by_strategy
from workbench.core.verdict import TOLERANCES, Verdict
from workbench.ui.runs.curve_pictures import curve_pictures
from workbench.ui.runs.table_rows import key_of, run_rows
from workbench.ui.runs.table_widget import RunTable


def pictures(*runs: RunRecord, truth: str = "", selected: str = "") -> list[ElementTree.Element]:
    members = {key_of(run): [run] for run in runs}
    found = curve_pictures(run_rows(runs, truths=[truth]), members, selected)
    return [ElementTree.fromstring(html) for html in found]


def curves(picture: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """The points of each strategy's first line."""
    found = {}
    for group in picture.iter("g"):
        line = next(path.attrib["d"] for path in group.iter("path"))
        points = [point.split() for point in line.removeprefix("M").split("L")]
        found[group.attrib["data-key"]] = [(float(x), float(y)) for x, y in points]
    return found


def colours(picture: ElementTree.Element) -> dict[str, str]:
    lines = {group.attrib["data-key"]: next(group.iter("path")).attrib["style"] for group in picture.iter("g")}
    return {key: re.search(r"stroke: ([^;]+)", style)[1] for key, style in lines.items()}  # type: ignore[index]


def test_losses_lie_over_one_another_with_one_device_behind(runs: list[RunRecord], baseline: RunRecord):
    loss, rate = pictures(*runs, baseline, truth="1 device")
    found = curves(loss)
    assert list(found) == ["1 device", "data", "model"], "one device first, so it lies behind; the failed run has none"
    assert found["data"] == found["1 device"] and len(found["data"]) == 3
    (x, high), _, (end, low) = found["data"]
    assert low > high and end > x, "the loss falls from 2 to 1, and pixels count from the top"
    assert colours(loss)["1 device"] == "var(--wb-idle)" and len(set(colours(loss).values())) == 3
    assert colours(loss) == colours(rate)
    legend = [span.text for div in loss.iter("div") for span in div.iter("span") if span.text]
    assert legend == ["data", "model", "1 device"]


def test_throughput_is_a_median_of_neighbours():
    times_s = (0.1,) * 30 + (10.0,) + (0.1,) * 30
    _, rate = pictures(make_record("data", step_times_s=times_s, losses=(1.0,) * 61))
    heights = {y for _, y in curves(rate)["data"]}
    assert len(heights) == 1, "one slow step moves no median"
    halves = (0.1,) * 2000 + (0.2,) * 3000
    _, rate = pictures(make_record("data", step_times_s=halves, losses=(1.0,) * 5000))
    points = curves(rate)["data"]
    assert len(points) <= 150 and points[-1][0] == max(x for x, _ in points)
    falls = next(x for (x, y), (_, after) in pairwise(points) if after > y + 1)
    assert (falls - points[0][0]) / (points[-1][0] - points[0][0]) == pytest.approx(0.4, abs=0.02)


def test_throughput_of_short_batches_is_that_of_their_samples():
    even = make_record("data", losses=(1.0,) * 9, step_times_s=(0.1,) * 9)
    short = replace(even, samples=(100,) * 4 + (5,) * 5, step_times_s=(0.1,) * 4 + (0.005,) * 5)
    assert curves(pictures(even)[-1]) == curves(pictures(short)[-1])


def test_a_strategy_that_a_run_changed_to_begins_at_its_step():
    segments = (Segment(0, "data", "*: data", 1.0), Segment(30, "model", "*: model", 1.0))
    run = make_record("data", losses=(1.0,) * 100, step_times_s=(0.1,) * 100, segments=segments)
    for picture in pictures(*by_strategy([run])):
        first, second = curves(picture).values()
        (_, middle), (start, end) = ((line[0][0], line[-1][0]) for line in (first, second))
        assert 0 < start - middle < 5 and (end - start) / (middle - first[0][0]) == pytest.approx(69 / 29, rel=0.02)


def test_colours_stay_while_the_table_is_sorted_and_filtered(runs: list[RunRecord]):
    table = RunTable()
    table.add(runs)
    first = re.findall(r'<g data-key="model".*?stroke: ([^;]+)', table.page.page)
    table.sort_by("name")
    table.filter_field.value = "model"
    (one, *_) = re.findall(r'<g data-key="model" style.*?stroke: ([^;]+)', table.page.page)
    assert one in first and one == "var(--wb-stage-1)"


def test_seeds_are_lines_of_one_colour_and_a_selected_row_stands_out():
    seeds = [make_record("data", settings={"seed": n}, run_id=f"r{n}", losses=(2.0 + n, 1.0)) for n in (0, 1)]
    table = RunTable()
    table.add([replace(run, name=f"data, seed {n}" if n else "data") for n, run in enumerate(seeds)])
    table.add([make_record("model")])
    table.select("model")
    groups = re.findall(r'<g data-key="(r0|model)" style="(.*?)"><title>.*?</title>(.*?)</g>', table.page.page)
    assert [(key, style, body.count("stroke-width: 1.5")) for key, style, body in groups] == [
        ("r0", "opacity: 0.25", 2), ("model", "", 1),
    ] * 2  # fmt: skip


def test_marks_of_equal_curves_are_at_different_steps():
    equal = [make_record(f"run {n}", losses=tuple(range(40, 0, -1))) for n in range(4)]
    loss, _ = pictures(*equal)
    places = [
        {path.attrib["transform"] for path in group.iter("path") if "transform" in path.attrib}
        for group in loss.iter("g")
    ]
    assert all(places) and len(set.union(*places)) == sum(map(len, places))


def apart_by(name: str, *differences: float, **changes: object) -> RunRecord:
    """A run whose losses differ so from one device's."""
    losses = tuple(1.0 + apart for apart in differences)
    verdict = Verdict(True, differences=differences)
    return make_record(name, losses=losses, step_times_s=(0.1,) * len(losses), **({"verdict": verdict} | changes))


def words(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter("text")]


def test_differences_to_one_device_are_drawn_by_their_logarithm():
    _, apart, _ = pictures(apart_by("data", 1e-4, 0.0, 1e-6, 1e-5))
    (points,) = curves(apart).values()
    steps, heights = zip(*points, strict=True)
    assert len(points) == 3 and steps[1] - steps[0] == pytest.approx(2 * (steps[2] - steps[1]), abs=0.2), "2 has none"
    limit = next(float(line.attrib["y1"]) for line in apart.iter("line") if line.get("class") == "wb-limit")
    assert limit - heights[0] == pytest.approx(heights[1] - limit, abs=0.2), "10 times the tolerance, and a tenth of it"
    assert heights[2] == pytest.approx(limit, abs=0.2)
    assert "tolerance 1e-5" in words(apart) and {"1e-6", "1e-4"} <= set(words(apart))


def test_a_difference_is_that_of_the_verdict_also_where_another_one_device_is_in_the_table(baseline: RunRecord):
    """One device with whole batches is drawn; a pipeline is compared with one that has its micro-batches."""
    run, whole_batches = apart_by("pipeline", 2e-6), replace(baseline, losses=(49.0,))
    _, apart, _ = pictures(run, whole_batches, truth="1 device")
    assert [title.text for title in apart.iter("title") if ", step " in (title.text or "")] == [
        "pipeline, step 1: 2e-6"
    ]


def test_each_part_of_a_run_has_the_differences_of_its_steps():
    segments = (Segment(0, "data", "*: data", 1.0), Segment(2, "model", "*: model", 1.0))
    runs = by_strategy([apart_by("data", 0.0, 0.0, 2e-6, segments=segments)])
    _, apart, _ = map(ElementTree.fromstring, curve_pictures(run_rows(runs), {key_of(run): [run] for run in runs}))
    tips = [title.text or "" for title in apart.iter("title")]
    assert [tip for tip in tips if ", step " in tip] == ["data \u2192 model, steps 3-3, step 3: 2e-6"]


def test_the_tolerance_is_that_of_the_precision():
    verdict = Verdict(True, tolerance=TOLERANCES["bf16"].loss, differences=(5e-3,))
    _, apart, _ = pictures(apart_by("data", 5e-3, verdict=verdict))
    assert "tolerance 2e-2" in words(apart) and "tolerance 1e-5" not in words(apart)


def test_one_step_of_one_device_is_a_dot(baseline: RunRecord):
    loss, *_ = pictures(apart_by("data", 0.0), replace(baseline, losses=(2.0,)), truth="1 device")
    (start, end) = curves(loss)["1 device"]
    style = next(loss.iter("g")).find("path").attrib["style"]  # type: ignore[union-attr]
    assert start == end and "stroke-linecap: round" in style


def test_without_a_verdict_or_a_difference_none_is_drawn(runs: list[RunRecord], baseline: RunRecord):
    assert len(pictures(*runs, baseline, truth="1 device")) == 2
    assert len(pictures(apart_by("data", 0.0))) == 2, "the losses are the same bits"


@pytest.mark.parametrize("apart", [math.nan, math.inf, 1e300, 5e-324, 0.0])
def test_differences_of_any_kind_stay_in_the_picture(apart: float, baseline: RunRecord):
    for picture in pictures(apart_by("data", 1e-7, apart, 0.0), baseline, truth="1 device"):
        points = [point for line in curves(picture).values() for point in line]
        assert points and all(0 <= x <= 346 and 0 <= y <= 236 for x, y in points)
        assert len(words(picture)) < 30


@pytest.mark.parametrize(
    "losses", [(math.nan,), (math.inf, math.nan), (), (1.0,), (-5.0, -6.0), (0.0, 0.0), (1e30, 1.0)]
)
def test_losses_of_any_kind_stay_in_the_picture(losses: tuple[float, ...]):
    found = pictures(make_record("data", losses=losses, step_times_s=(0.1,) * len(losses)), make_record("model"))
    points = [point for picture in found for line in curves(picture).values() for point in line]
    assert points and all(0 <= x <= 346 and 0 <= y <= 236 for x, y in points)


@pytest.mark.parametrize(
    "losses",
    [
        ((2e-13, 1e-13), (2e-13, 1e-13)),
        ((1.0,), (1.0 + 2e-16,)),
        ((-1.0,), (-1.0 - 2e-16,)),
        ((3e-14,), (3e-14 + 1e-29,)),
        ((-3e-14,), (-3e-14,)),
    ],
)
def test_tiny_losses_and_losses_that_hardly_differ_have_an_axis(losses: tuple[tuple[float, ...], ...]):
    runs = [make_record(f"run {n}", losses=own, step_times_s=(0.1,) * len(own)) for n, own in enumerate(losses)]
    loss, _ = pictures(*runs)
    assert all(0 <= x <= 346 and 24 <= y <= 200 for line in curves(loss).values() for x, y in line)
    numbers = [text.text for text in loss.iter("text") if text.get("class") == "quiet end" and text.text != "step"]
    assert len(numbers) == len(set(numbers)) >= 2


def test_of_many_runs_some_are_drawn_and_without_steps_none():
    loss, _ = pictures(*(make_record(f"run {n}") for n in range(11)))
    assert len(curves(loss)) == 8 and "3 rows not drawn" in ElementTree.tostring(loss, encoding="unicode")
    assert pictures(make_record("data", losses=(), step_times_s=())) == []


def test_long_runs_make_a_small_picture():
    long = [make_record(f"run {n}", losses=tuple(range(5000)), step_times_s=(0.01,) * 5000) for n in range(8)]
    found = curve_pictures(run_rows(long), {key_of(run): [run] for run in long})
    assert sum(map(len, found)) < 60_000
