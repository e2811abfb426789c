"""The comparison: rows as data, the scatter as SVG, and the table around them without a browser."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from tests.core.test_segments import RUN as CHANGED
from tests.ui.conftest import make_record
from workbench.core.metrics import RunRecord
from workbench.core.segments import by_strategy
from workbench.session.comparison.compare import CompareResult
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.ui.pictures.svg import text_width
from workbench.ui.runs.render_table import comparison_table_text
from workbench.ui.runs.runs_view import show_runs
from workbench.ui.runs.scatter_picture import HEIGHT, WIDTH, scatter_picture
from workbench.ui.runs.table_rows import (
    key_of,
    pareto_front,
    prediction_errors,
    rows_csv,
    run_rows,
    sorted_rows,
)
from workbench.ui.runs.table_widget import RunTable
from workbench.ui.static_panel import static_text


def names(rows) -> list[str]:
    return [row.name for row in rows]


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_a_row_has_numbers_and_what_people_read(runs: list[RunRecord]):
    row = run_rows([replace(runs[0], predicted={"step_s": 0.0194, "samples_per_s": 5150.0}, bubble=0.25)])[0]
    assert row.values["step_s"] == pytest.approx(0.02) and row.values["error"] == pytest.approx(-0.03)
    assert row.texts["error"] == "\u22123 %" and row.texts["bubble"] == "25 %" and row.texts["step_s"] == "20.0 ms"
    assert row.on_front and not row.is_baseline


def test_speed_ups_are_over_the_chosen_baseline(runs: list[RunRecord], baseline: RunRecord):
    rows = run_rows([*runs, baseline], baseline="model", truths=["1 device"])
    speedups = {row.name: row.values["speedup"] for row in rows}
    assert speedups["data"] == pytest.approx(5000 / 3000) and speedups["model"] == 1.0
    assert speedups["1 device"] == pytest.approx(4000 / 3000) and speedups["pipeline"] is None
    assert [row.name for row in rows if row.is_baseline] == ["model"]
    rows = run_rows([runs[0], baseline], truths=["1 device"])
    assert [row.values["speedup"] for row in rows] == [1.25, 1.0]
    slow = replace(baseline, samples_per_s=2000.0)
    assert [row.values["speedup"] for row in run_rows([runs[0], slow], truths=["1 device"])] == [2.5, 1.0]
    assert " 2.50x" in comparison_table_text([runs[0]], slow), "not over the one device of the run's own time"


def test_a_run_that_failed_shows_what_was_predicted(runs: list[RunRecord]):
    failed = replace(runs[2], predicted={"step_s": 2.78, "peak_bytes": 741e6, "bubble": 0.0})
    row = run_rows([failed])[0]
    assert row.texts["peak_bytes"] == "741 MB" and row.texts["predicted_s"] == "2.78 s"
    assert row.texts["samples_per_s"] == "\u2013" and row.failure == "stage 9 of 2 stages"


def test_sorting_puts_the_better_end_first_and_unknown_last(runs: list[RunRecord]):
    rows = run_rows(runs)
    assert names(sorted_rows(rows)) == ["data", "model", "pipeline"]
    assert names(sorted_rows(rows, "peak_bytes")) == ["model", "data", "pipeline"]
    assert names(sorted_rows(rows, "peak_bytes", ascending=False)) == ["data", "model", "pipeline"]
    assert names(sorted_rows(rows, "name", ascending=False)) == ["pipeline", "model", "data"]


def test_csv_has_numbers_in_si_units(runs: list[RunRecord]):
    (first, *_) = csv.DictReader(io.StringIO(rows_csv(run_rows(runs))))
    assert first["name"] == "data" and float(first["peak_bytes"]) == 8e6 and first["equal"] == "True"


def test_the_name_of_a_model_is_text():
    table = RunTable()
    table.add([make_record("data", settings={"model": "<lambda>"})])
    assert "&lt;lambda&gt; \u00b7 batch 100" in table.facts.value


def test_how_good_predictions_were(runs: list[RunRecord]):
    predicted = [replace(runs[0], predicted={"step_s": 0.02 * factor}) for factor in (1.01, 0.9, 1.03)]
    assert prediction_errors(run_rows(predicted)) == pytest.approx((0.03, 0.1))
    assert prediction_errors(run_rows(predicted[:2])) == pytest.approx((0.055, 0.1))
    assert prediction_errors(run_rows(runs)) is None


# ---- the scatter ----------------------------------------------------------------------------------------------------


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


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_points_carry_their_keys_and_the_front_is_filled(runs: list[RunRecord], baseline: RunRecord):
    slow = make_record("slow", samples_per_s=1000.0, peak_memory_bytes=(9_000_000,) * 2)
    rows = run_rows([*runs, slow, baseline], truths=["1 device"])
    svg = parsed(scatter_picture(rows, selected="model", limit_bytes=10e6))
    marks = {group.get("data-key"): [child.get("class") for child in group] for group in svg.iter("g")}
    assert marks == {"data": ["full"], "model": ["wb-ring", "full"], "slow": ["hollow"], "1 device": ["square"]}
    assert any("limit 10" in (text.text or "") for text in svg.iter("text"))
    assert "MB" in "".join(text.text or "" for text in svg.iter("text"))


def test_labels_never_cover_each_other_or_leave_the_picture():
    runs = [
        make_record(f"strategy {i}", samples_per_s=5000.0 + 40 * i, peak_memory_bytes=(8_000_000 + 50_000 * i,))
        for i in range(12)
    ]
    runs.append(make_record("far away", samples_per_s=500.0, peak_memory_bytes=(1_000_000,)))
    svg = parsed(scatter_picture(run_rows(runs)))
    labels = [text for text in svg.iter("text") if (text.text or "").startswith("strategy")]
    assert 1 <= len(labels) < 12, "there is no room for all of them"
    for text in svg.iter("text"):
        assert 0 <= float(text.get("x")) <= WIDTH and 0 <= float(text.get("y")) <= HEIGHT


def test_without_runs_there_is_no_picture():
    assert "no finished runs" in scatter_picture([])


def test_a_long_name_does_not_cover_the_numbers_of_the_axis(runs: list[RunRecord]):
    long = [replace(run, name=f"data, steps 1-{number}7 of many") for number, run in enumerate(runs[:2])]
    texts = [text for text in parsed(scatter_picture(run_rows(long))).iter("text") if (text.text or "")[:6] == "data, "]
    assert texts
    for text in texts:
        width, x = text_width(text.text or "", 12), float(text.attrib["x"])
        css = text.attrib["class"].split()
        left = x - (width if "end" in css else width / 2 if "middle" in css else 0)
        assert left >= 38, "numbers of the axis end at 34"


# ---- the table ------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(runs: list[RunRecord], baseline: RunRecord, tmp_path) -> RunTable:
    made = RunTable(saved=SavedRuns(tmp_path))
    made.add(runs, [baseline])
    return made


def test_a_click_on_the_cross_finds_where_the_run_parts(runs: list[RunRecord], baseline: RunRecord, tmp_path):
    asked: list[str] = []
    table = RunTable(saved=SavedRuns(tmp_path), part=lambda run: asked.append(run.strategy))
    wrong = make_record("wrong", equal=False)
    table.add([*runs, wrong], [baseline])
    marks = re.findall(r'data-part="([^"]*)"', table.page.page)
    assert len(marks) == len([run for run in [*runs, wrong] if run.equal is False])
    assert table.part_button.disabled and "select a run" in table.part_button.tooltip
    say(table, "part", next(mark for mark in marks if "wrong" in mark))
    assert asked == ["*: wrong"] and not table.part_button.disabled
    table.part_button.click()
    table.show_answer("layer 'a' < 'b'")
    assert asked == ["*: wrong"] * 2 and "layer 'a' &lt; 'b'" in table.answer.value
    table.sort_by("name")
    assert "layer 'a'" in table.answer.value
    table.select(runs[0].name)
    assert not table.answer.value, "it is about another row"
    table.show_answer("layer 'b'")
    table.add([make_record("newer")])
    assert not table.answer.value, "the table has another row"


def shown(table: RunTable) -> list[str]:
    return re.findall(r"<tr[^>]*data-key=\"([^\"]*)\"", table.page.page)


def say(table: RunTable, event: str, value: str, **more: str) -> None:
    table._on_event({"event": event, "value": value, **more})


def test_a_click_on_a_header_sorts_and_a_second_one_turns_round(table: RunTable):
    assert shown(table) == ["data", "1 device", "model", "pipeline"]
    say(table, "sort", "peak_bytes")
    assert shown(table) == ["model", "data", "1 device", "pipeline"]
    say(table, "sort", "peak_bytes")
    assert shown(table) == ["1 device", "data", "model", "pipeline"]
    say(table, "sort", "nonsense")


def test_selecting_marks_row_and_point(table: RunTable):
    say(table, "select", "model")
    assert table.page.page.count("wb-ring") == 1 and 'class="selected"' in table.page.page
    say(table, "select", "model")
    assert "wb-ring" not in table.page.page


def test_hide_and_show_again(table: RunTable):
    say(table, "select", "model")
    table.hide_button.click()
    assert "model" not in shown(table) and table.show_button.description == "Show hidden (1)"
    table.show_button.click()
    assert "model" in shown(table)


def test_a_filter_narrows_the_table_and_a_wrong_one_says_why(table: RunTable):
    table.filter_field.value = "memory < 5"
    assert shown(table) == ["model"]
    table.filter_field.value = "colour < 5"
    assert len(shown(table)) == 4 and "no column" in table.filter_field.tooltip


def test_names_are_kept_on_disk(tmp_path, runs: list[RunRecord]):
    saved = SavedRuns(tmp_path)
    record = saved.begin(runs[0]).finish(runs[0])
    table = RunTable(saved=saved)
    table.add([record])
    say(table, "rename", record.run_id, name="first <try>")
    assert saved[record.run_id].name == "first <try>" and "first &lt;try&gt;" in table.page.page


def test_runs_of_other_days_are_loaded(tmp_path, runs: list[RunRecord]):
    saved = SavedRuns(tmp_path)
    old = saved.begin(runs[1]).finish(replace(runs[1], started="2026-11-20T10:00:00+00:00"))
    table = RunTable(saved=saved)
    table.add([replace(runs[0], started="2026-11-22T10:00:00+00:00")])
    table.load_button.click()
    ((text, run_id),) = table.saved_list.options
    assert run_id == old.run_id and "2026-11-20 10:00  model" in text
    table.saved_list.value = (run_id,)
    table.add_button.click()
    assert set(shown(table)) == {"data", old.run_id} and "2026-11-20 to 2026-11-22" in table.facts.value


def test_the_baseline_is_chosen_from_the_runs(table: RunTable):
    table.baseline_field.value = "model"
    assert "1.67\u00d7" in table.page.page and 'class="chip"' in table.page.page


def test_exports(table: RunTable, tmp_path):
    data = json.loads(table.exported("json"))
    assert [run["name"] for run in data["runs"]] == ["data", "model", "pipeline"]
    assert data["baseline"]["name"] == "1 device"
    assert table.exported("csv").splitlines()[1].startswith("data,")
    page = table.export(str(tmp_path / "out" / "page.html")).read_text()
    assert page.startswith("<!doctype html>") and "<svg" in page and "http" not in re.findall(r'src="([^"]*)"', page)
    with pytest.raises(ValueError, match=r"there are csv, json, html"):
        table.export(str(tmp_path / "x.pdf"))


def test_open_and_run_again_hand_over_the_strategy(runs: list[RunRecord], tmp_path):
    opened: list[str] = []
    table = RunTable(*[lambda run: opened.append(run.strategy)] * 2, SavedRuns(tmp_path))
    table.add(runs)
    assert table.open_button.disabled and table.open_button.tooltip == "select a run first"
    say(table, "select", "model")
    table.open_button.click()
    table.again_button.click()
    assert opened == ["*: model", "*: model"]


def test_any_runs_can_be_shown(runs: list[RunRecord], baseline: RunRecord, tmp_path):
    compared = CompareResult(baseline, runs)
    assert len(shown(show_runs(compared).table)) == 4
    saved = SavedRuns(tmp_path)
    saved.begin(runs[0]).finish(runs[0])
    view = show_runs(saved, limit_bytes=10e6)
    assert len(shown(view.table)) == 1 and "limit 10" in view.table.static_html()


def test_before_the_first_run_runs_of_other_days_can_be_loaded(runs: list[RunRecord], tmp_path):
    saved = SavedRuns(tmp_path)
    saved.begin(runs[0]).finish(runs[0])
    table = RunTable(saved=saved)
    assert "No finished runs yet" in str(table.box.children[0].children[0].value) and table.static_html() == ""
    assert table.load_button in table.box.children[0].children
    table.load_button.click()
    table.saved_list.value = [table.saved_list.options[0][1]]
    table.add_button.click()
    assert len(shown(table)) == 1 and table.page in table.box.children


# ---- a run whose strategy changed on the way ------------------------------------------------------------------------


def test_every_strategy_of_a_run_has_its_row_in_table_picture_and_report():
    table = RunTable()
    table.add([make_record("plain"), CHANGED])
    parts = ["data, steps 1-40", "data \u2192 model, steps 41-100"]
    assert set(names(table.rows)) == {"plain", *parts}
    rows = {row.name: row for row in table.rows}
    assert rows[parts[0]].values["boxed_bytes"] == 64 and rows[parts[1]].values["boxed_bytes"] == 16
    assert rows[parts[0]].values["predicted_s"] == 0.01 and rows[parts[1]].values["predicted_s"] == 0.03
    assert rows[parts[1]].texts["loss_difference"] == "\u2013"
    table.add([CHANGED])
    assert len(table.rows) == 3, "known already"
    for page in (table.page.page, table.static_html(), table.exported("html"), static_text("", [CHANGED], None)):
        assert all(part in page for part in parts)
    opened = []
    table = RunTable(lambda run: opened.append(run.strategy))
    table.add([CHANGED])
    table.select(key_of(by_strategy([CHANGED])[1]))
    table.open_button.click()
    assert opened == ["*: model"], "its own strategy"


def test_the_whole_run_is_saved_exported_and_loaded_again(tmp_path):
    saved = SavedRuns(tmp_path)
    kept = saved.begin(replace(CHANGED, run_id="")).finish(replace(CHANGED, run_id=""))
    table = RunTable(saved=saved)
    table.add(saved)
    (exported,) = json.loads(table.exported("json"))["runs"]
    assert RunRecord.from_dict(exported) == kept and len(table.rows) == 2
    table.rename(table.rows[0].key, "mine")
    assert "mine" in names(table.rows) and saved[kept.run_id].name == "data", "a part has its name on the page only"


# ---- runs that are on no disk ---------------------------------------------------------------------------------------


def test_runs_of_one_name_that_are_on_no_disk_are_rows_of_their_own(tmp_path):
    one, other = make_record("data", losses=(3.0, 2.0)), make_record("data", losses=(2.5, 1.5), batch_size=200)
    view = show_runs([one, other])
    view.table.add([one, replace(other)])
    assert view.table.runs[0] is one and len(view.table.rows) == 2, "known already"
    view.table.add([make_record("data", losses=(1.0, 0.5), batch_size=300)])
    assert sorted(row.values["final_loss"] for row in view.table.rows) == [0.5, 1.5, 2.0]
    drawn = {row.key: view.table._groups[row.key][0].losses[-1] for row in view.table.rows}
    assert drawn == {row.key: row.values["final_loss"] for row in view.table.rows}
    runs = CompareResult.from_json(view.table.export(str(tmp_path / "all.json")).read_text()).runs
    assert sorted(run.batch_size for run in runs) == [100, 200, 300] and {run.run_id for run in runs} == {""}
    assert {run.name for run in runs} == {"data"}
    assert view.table.exported("csv").count("data") == 2 * 3 and view.table.exported("html").count("wb-table") > 0


def test_a_rename_and_a_choice_are_of_one_of_the_runs_of_a_name():
    opened = []
    table = RunTable(lambda run: opened.append(run.batch_size))
    table.add([make_record("data"), make_record("data", batch_size=200)])
    second = next(row.key for row in table.rows if row.key != "data")
    table.select(second)
    table.open_button.click()
    table.rename(second, "larger batch")
    assert opened == [200] and sorted(names(table.rows)) == ["data", "larger batch"]
    table.hide()
    assert names(table.rows) == ["data"]


def test_a_changed_run_on_no_disk_is_known_again():
    run = replace(CHANGED, run_id="")
    table = RunTable()
    table.add([run, replace(run, batch_size=999)])
    table.add([run], selected=run)
    assert len(table.rows) == 4 and table.selected == "data \u2192 model, steps 41-100"


def test_losses_that_are_no_numbers_are_last_in_both_directions():
    rows = run_rows([make_record(str(loss), losses=(loss,)) for loss in (3.0, math.nan, 1.0, math.inf)])
    assert names(sorted_rows(rows, "final_loss")) == ["1.0", "3.0", "inf", "nan"]
    assert names(sorted_rows(rows, "final_loss", ascending=False)) == ["inf", "3.0", "1.0", "nan"]
