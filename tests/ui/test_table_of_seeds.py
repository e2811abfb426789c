"""The comparison of runs that differ in their seed only: one row with means, error bars, and every run beneath it."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from tests.ui.conftest import make_record
from workbench.core.metrics import RunRecord
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.ui.runs.scatter_picture import scatter_picture
from workbench.ui.runs.table_widget import RunTable
from workbench.ui.static_panel import static_text


def names(rows) -> list[str]:
    return [row.name for row in rows]


def say(table: RunTable, event: str, value: str, **more: str) -> None:
    table._on_event({"event": event, "value": value, **more})


def with_seed(seed: int, name: str = "data", **changes: object) -> RunRecord:
    """One of several seeds: 4900, 5000 or 5100 samples/s, a last loss of 1.0, 1.1 or 1.2."""
    own = f"{name}, seed {seed}" if seed else name
    values = {"samples_per_s": 4900.0 + 100 * seed, "losses": (2.0, 1.5, 1 + seed / 10), "run_id": f"{name}-{seed}"}
    return replace(make_record(own, strategy=f"*: {name}", settings={"seed": seed, "steps": 3}), **(values | changes))


SEEDS = [with_seed(0), with_seed(1), with_seed(2)]


@pytest.fixture
def seeds(runs: list[RunRecord], baseline: RunRecord, tmp_path) -> RunTable:
    made = RunTable(*[lambda run: None] * 2, saved=SavedRuns(tmp_path), another=lambda run: None)
    truths = [replace(baseline, name=f"1 device{n}", settings={"seed": n}, run_id=f"d{n}") for n in (0, 1, 2)]
    made.add([*SEEDS, runs[1]], truths)
    return made


def test_runs_of_several_seeds_are_one_row_with_mean_and_spread(seeds: RunTable):
    assert [(row.key, row.name) for row in seeds.rows if not row.is_truth] == [("data-0", "data"), ("model", "model")]
    row = seeds.rows[0]
    assert row.values["samples_per_s"] == 5000 and row.spread["samples_per_s"] == pytest.approx(100)
    assert row.values["final_loss"] == pytest.approx(1.1) and row.spread_text("final_loss") == "\u00b1 0.1"
    page = seeds.page.page
    assert ">3 seeds<" in page and "over the seeds 0, 1, 2" in page and "\u00b1 100" in page
    assert page.count("<u style=") == 1, "an error bar on the bar of the mean"
    assert seeds.means.layout.display == ""
    seeds.means.value = False
    assert [row.name for row in seeds.rows if not row.is_truth] == ["data, seed 2", "data, seed 1", "data", "model"]
    assert "\u00b1" not in seeds.page.page and sum(row.is_truth for row in seeds.rows) == 3


def test_the_scatter_has_error_bars(seeds: RunTable):
    svg = ElementTree.fromstring(scatter_picture(seeds.rows))
    upright = [line for line in svg.iter("line") if line.get("class") == "spread" and line.get("x1") == line.get("x2")]
    (bar,) = upright
    (point,) = [group[0] for group in svg.iter("g") if group.get("data-key") == "data-0"]
    low, high = sorted((float(bar.attrib["y1"]), float(bar.attrib["y2"])))
    assert (low + high) / 2 == pytest.approx(float(point.attrib["cy"]), abs=0.1) and high - low > 1
    assert "5\u202f000 \u00b1 100 samples/s" in (point[0].text or "")


def test_a_seed_that_fails_or_differs_stands_out(runs: list[RunRecord]):
    table = RunTable()
    table.add([*SEEDS[:2], with_seed(2, error="rank 1 died")])
    assert [row.name for row in table.rows] == ["data", "data, seed 2"] and "rank 1 died" in table.page.page
    asked: list[str] = []
    table = RunTable(part=lambda run: asked.append(run.name))
    table.add([SEEDS[0], replace(SEEDS[1], equal=False)])
    assert table.rows[0].equal is False
    say(table, "part", "data-0")
    assert asked == ["data, seed 1"], "the seed that differs"


def test_the_table_without_several_seeds_has_no_switch(runs: list[RunRecord]):
    table = RunTable()
    table.add(runs)
    assert table.means.layout.display == "none" and "\u00b1" not in table.page.page


def test_selecting_and_repeating_a_row_of_seeds():
    asked: list[str] = []
    table = RunTable(another=lambda run: asked.append(run.name))
    table.selected = "data-2"
    table.add(SEEDS)
    assert table.selected == "data-0", "the row that has this run"
    table.seed_button.click()
    assert asked == ["data"]
    table.select("data-0")
    assert table.seed_button.disabled and table.seed_button.tooltip == "select a run first"


def test_names_exports_and_files_keep_every_seed(tmp_path):
    saved = SavedRuns(tmp_path)
    kept = [saved.begin(replace(run, run_id="")).finish(replace(run, run_id="")) for run in SEEDS]
    table = RunTable(saved=saved)
    table.add(saved)
    say(table, "rename", table.rows[0].key, name="mine")
    assert names(table.rows) == ["mine"] and sorted(run.name for run in saved) == [
        "mine",
        "mine, seed 1",
        "mine, seed 2",
    ]
    again = RunTable(saved=saved)
    again.add(saved)
    assert names(again.rows) == ["mine"], "loaded again they are one row"
    found = json.loads(table.exported("json"))["runs"]
    assert [run["settings"]["seed"] for run in found] == [0, 1, 2] and {run["run_id"] for run in found} == {
        run.run_id for run in kept
    }
    (line,) = csv.DictReader(io.StringIO(table.exported("csv")))
    assert float(line["samples_per_s_std"]) == pytest.approx(100) and float(line["final_loss"]) == pytest.approx(1.1)
    page = table.exported("html")
    assert "means \u00b1 standard deviations" in page and "All 1 strategies equal one device in 3 runs" in page
    assert "mean" in static_text("", SEEDS, None) or "\u00b1 100" in static_text("", SEEDS, None)


def test_the_cost_of_fewer_steps_says_so(runs: list[RunRecord], baseline: RunRecord):
    table = RunTable()
    planned = {"settings": {"seed": 0, "steps": 9}}
    table.add([replace(runs[0], settings={"seed": 0, "steps": 3})], [replace(baseline, **planned)])
    assert {row.name: row.steps for row in table.rows} == {"data": "", "1 device": "3 steps"}
    assert table.page.page.count("<small>3 steps</small>") == 1
