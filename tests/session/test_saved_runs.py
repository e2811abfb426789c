"""Runs on disk: written line by line, read again, also when the writer died."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from tests.ui.conftest import make_record
from workbench.core.metrics import ActionSpan, RunEvent, RunRecord, StepBlock, StepSpans
from workbench.errors import SessionError
from workbench.session.comparison.saved_runs import FOLDER_VARIABLE, SavedRuns, default_folder
from workbench.ui.runs.table_widget import RunTable


def block(first_step: int, *losses: float) -> StepBlock:
    steps = len(losses)
    times = ((0.125,) * steps, (0.25,) * steps)
    memory = ({"parameters": 8, "peak": 9}, {"parameters": 8, "peak": 7})
    return StepBlock(first_step, (64,) * steps, losses, times, times, ((5,) * steps,) * 2, memory, 10)


@pytest.fixture
def saved(tmp_path) -> SavedRuns:
    return SavedRuns(tmp_path / "runs")


def planned(name: str = "data") -> RunRecord:
    return RunRecord(name, "*: data", 2, 64, settings={"seed": 3, "model": "make_mlp"})


def test_a_finished_run_comes_back_as_it_was(saved):
    record = make_record("data", changes=((3, "*: model"),), predicted={"step_s": 0.5}, settings={"seed": 3})
    finished = saved.begin(planned()).finish(record)
    assert saved[finished.run_id] == finished == replace(record, run_id=finished.run_id)
    assert list(saved) == [finished] and len(saved) == 1


def test_everything_that_was_reported_is_kept(saved):
    messages = [
        block(0, 2.0, 1.5),
        StepSpans(1, 1, (ActionSpan("F", 0, 0, 1.0, 2.0, 0.5, 3, 100),)),
        RunEvent("strategy", 2, "*: model", 0.25, 1000),
        block(2, 1.25),
    ]
    with saved.begin(planned()) as file:
        file.add([*messages, "something else"])
    assert saved.messages(file.run_id) == messages


def test_a_run_whose_writer_died_has_its_steps_and_says_so(saved):
    with saved.begin(planned()) as file:
        file.add([block(0, 2.0, 1.5)])
    path = saved.folder / f"{file.run_id}.jsonl"
    path.write_text(path.read_text() + '{"line":"steps","first_st')
    record = saved[file.run_id]
    assert record.losses == (2.0, 1.5) and record.step_times_s == (0.25, 0.25)
    assert "not finished" in record.error and record.settings["seed"] == 3


def test_names_can_change_and_runs_be_removed(saved):
    run_id = saved.begin(planned()).finish(make_record("data")).run_id
    saved.rename(run_id, "data, first try")
    assert saved[run_id].name == "data, first try"
    saved.remove(run_id)
    assert saved.ids() == []
    with pytest.raises(SessionError, match=r"no such run among the 0"):
        saved[run_id]


def test_runs_that_begin_at_once_get_files_of_their_own(saved):
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(saved.begin(planned()).run_id)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8 and sorted(found) == saved.ids()


def test_lines_are_plain_json_and_files_are_the_users_own(saved):
    with saved.begin(planned("data & more / odd")) as file:
        file.add([block(0, float("nan"))])
    path = saved.folder / f"{file.run_id}.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600 and file.run_id.endswith("data-more-odd")
    head = json.loads(path.read_text().splitlines()[0])
    assert head["line"] == "run" and head["record"]["settings"]["seed"] == 3 and head["record"]["started"]


def test_an_empty_folder_is_a_place_for_runs(saved):
    assert SavedRuns.of(saved) is saved and not saved.ids()
    assert SavedRuns.of(keep=False) is None and SavedRuns.of(keep=True).folder == default_folder()
    assert RunTable(saved=saved).saved is saved


def test_the_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "here"))
    assert default_folder() == tmp_path / "here" == SavedRuns().folder
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "workbench" / "runs"
    assert "0 runs" in repr(SavedRuns())
