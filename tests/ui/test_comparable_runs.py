"""Runs of other tasks, machines and days beside those of today: what is compared, loaded and repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.test_segments import RUN as CHANGED
from tests.ui.conftest import make_record
from tests.ui.reports import FakeTrainer
from workbench.core.strategy import Strategy
from workbench.session.comparison.comparison import NO_STRATEGY
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.ui.runs.comparable import other_task
from workbench.ui.runs.runs_section import PanelCallbacks, RunsSection
from workbench.ui.runs.scatter_picture import scatter_picture
from workbench.ui.runs.table_rows import run_rows
from workbench.ui.runs.table_widget import RunTable

ONE_DEVICE = make_record(
    "one device", strategy=NO_STRATEGY, num_ranks=1, settings={"seed": 0}, started="2026-11-20T10:00:00+00:00"
)


def offered(table: RunTable) -> list[str]:
    """The runs that the list offers now."""
    table._loader.layout.display = "none"
    table.load_button.click()
    return [run_id for _, run_id in table.saved_list.options]


def load(table: RunTable, *run_ids: str) -> None:
    assert set(run_ids) <= set(offered(table))
    table.saved_list.value = run_ids
    table.add_button.click()


def on_front(rows) -> set[str]:
    return {row.name for row in rows if row.on_front}


# ---- what is compared -----------------------------------------------------------------------------------------------


def test_a_pareto_line_is_of_one_task_on_one_machine_among_the_rows_that_are_shown():
    small = {"model": "mlp", "machine": "A", "device": "cpu"}
    runs = [
        make_record("fast", settings=small, samples_per_s=5000.0),
        make_record("slow", settings=small, samples_per_s=4000.0),
        make_record("large", settings=small | {"model": "gpt"}, samples_per_s=10.0),
        make_record("other batch", settings=small, samples_per_s=100.0, batch_size=400),
        make_record("cuda", settings=small | {"device": "cuda"}, samples_per_s=50.0),
    ]
    others = {"large", "other batch", "cuda"}
    assert on_front(run_rows(runs)) == {"fast", *others}
    assert scatter_picture(run_rows(runs)).count("wb-front-line") == 4
    table = RunTable()
    table.add(runs)
    table.select("fast")
    table.hide()
    assert on_front(table.rows) == {"slow", *others}
    table.show_all()
    table.filter_field.value = "slow"
    assert on_front(table.rows) == {"slow"}


# ---- what is loaded -------------------------------------------------------------------------------------------------


def test_a_loaded_run_on_one_device_is_a_reference(tmp_path: Path):
    """It was a row whose strategy could be opened and run again, and is none."""
    saved = SavedRuns(tmp_path)
    old = saved.begin(ONE_DEVICE).finish(ONE_DEVICE)
    table = RunTable(*[lambda run: None] * 2, saved)
    load(table, old.run_id)
    assert [row.is_truth for row in table.rows] == [True] and "one device" in table.page.page
    table.select(old.run_id)
    assert table.open_button.disabled and table.again_button.disabled
    assert offered(table) == [], "the table has it"


def test_the_newest_run_on_one_device_is_the_reference_of_its_task(tmp_path: Path):
    saved = SavedRuns(tmp_path)
    today = replace(ONE_DEVICE, started="2026-11-22T10:00:00+00:00", samples_per_s=2500.0)
    old, new = (saved.begin(run).finish(run) for run in (ONE_DEVICE, today))
    table = RunTable(saved=saved)
    table.add([make_record("data", settings={"seed": 0})], [new])
    assert offered(table) == [old.run_id], "not the one of this session"
    load(table, old.run_id)
    assert table.truth == new and sum(row.is_truth for row in table.rows) == 1
    assert [row.values["speedup"] for row in table.rows if row.name == "data"] == [2.0]
    table.add([replace(old, settings={"seed": 0, "machine": "B"})])
    assert sum(row.is_truth for row in table.rows) == 2, "another machine has its own"


def test_a_run_that_is_loaded_before_its_end_gets_its_result(tmp_path: Path):
    saved = SavedRuns(tmp_path)
    file = saved.begin(make_record("data"))
    table = RunTable(saved=saved)
    load(table, file.run_id)
    assert table.rows[0].failure and offered(table) == []
    done = file.finish(make_record("data"))
    assert offered(table) == [done.run_id], "it has ended by now"
    table.add([done])
    assert [row.failure for row in table.rows] == [""] and offered(table) == []
    table.add([done])
    assert len(table.rows) == 1


def test_a_run_whose_strategy_changed_is_offered_once(tmp_path: Path):
    saved = SavedRuns(tmp_path)
    kept = saved.begin(replace(CHANGED, run_id="")).finish(replace(CHANGED, run_id=""))
    table = RunTable(saved=saved)
    load(table, kept.run_id)
    assert len(table.rows) == 2 and offered(table) == []


# ---- what is repeated -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {"model": "gpt", "loss": "mse_loss"}}, "its model is gpt, here it is mlp. Open in panel"),
        ({"num_ranks": 4}, "its number of ranks is 4, here it is 2"),
        ({"batch_size": 7}, "its batch size is 7, here it is 100"),
    ],
)
def test_a_run_of_another_task_is_refused_with_both(trainer: FakeTrainer, changes: dict, words: str):
    asked: list[object] = []
    trainer.settings = {"model": "mlp", "batch_size": 100}
    trainer.first_difference = lambda *of: asked.append(of)  # type: ignore[attr-defined]
    part = RunsSection(trainer, 3, PanelCallbacks(lambda: (Strategy("*: data"), "data"), opened=asked.append))
    table = part.table
    table.add([make_record("data", equal=False, **changes)])
    table.select("data")
    for each in (table.part_button, table.again_button, table.seed_button):
        table.show_answer("")
        each.click()
        assert words in table.answer.value
    assert not asked and not trainer.runs


def test_a_setting_of_several_lines_is_said_in_one():
    run = make_record("data", settings={"optimizer": "def f(p):\n    return SGD(p)", "loss": "the model's own"})
    assert other_task(run, 2, {"optimizer": "Adam", "loss": "mse_loss"}) == (
        "its optimizer is def f(p): return SGD(p), here it is Adam; its loss is the model's own, here it is mse_loss"
    )
    assert other_task(run, 2, {}) == "", "nothing is known"
