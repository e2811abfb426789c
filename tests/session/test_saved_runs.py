"""Runs on disk: written line by line, read again, also when the writer died."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.session.simulated_session import SimulatedSession
from tests.ui.conftest import make_record
from workbench.core.metrics import ActionSpan, RunEvent, RunRecord, StepBlock, StepSpans
from workbench.core.strategy import Strategy
from workbench.errors import SessionError
from workbench.session.comparison.compare import CompareResult
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.saved_runs import FOLDER_VARIABLE, RunFile, SavedRuns, default_folder
from workbench.session.comparison.training_run import TrainingRun
from workbench.session.on_engine import shell
from workbench.ui.runs.table_widget import RunTable
from workbench.writers.run_log import RunLog


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


def test_reports_of_a_finished_run_are_not_read_for_its_record(saved, monkeypatch):
    """A list of runs that had trained for hours took all of the notebook's memory."""
    with saved.begin(planned()) as file:
        file.add([block(step, 1.0) for step in range(5)] + [StepSpans(0, step, ()) for step in range(5)])
        file.finish(make_record("data", samples=(100,) * 3))
    read, plain = list[bytes](), json.loads
    monkeypatch.setattr(json, "loads", lambda text: read.append(text) or plain(text))
    assert [run.name for run in saved] == ["data"] and len(read) == 2
    assert len(saved.messages(file.run_id)) == 10


def test_a_run_whose_writer_died_has_its_steps_and_says_so(saved):
    with saved.begin(planned()) as file:
        file.add([block(0, 2.0, 1.5)])
    path = saved.folder / f"{file.run_id}.jsonl"
    path.write_text(path.read_text() + '{"line":"steps","first_st')
    record = saved[file.run_id]
    assert record.losses == (2.0, 1.5) and record.step_times_s == (0.25, 0.25) and record.samples == (64, 64)
    assert record.error.startswith("has not finished: it still runs, or") and record.settings["seed"] == 3


def test_a_record_of_an_older_version_has_the_samples_that_were_reported(saved):
    with saved.begin(planned()) as file:
        file.add([replace(block(0, 2.0, 1.5), samples=(64, 5))])
        file.finish(make_record("data", losses=(2.0, 1.5), step_times_s=(0.25, 0.25)))
    assert saved[file.run_id].samples == (64, 5) and saved[file.run_id].step_rates == (256.0, 20.0)


def test_names_can_change_and_runs_be_removed(saved):
    run_id = saved.begin(planned()).finish(make_record("data")).run_id
    saved.rename(run_id, "data, first try")
    assert saved[run_id].name == "data, first try"
    saved.remove(run_id)
    assert saved.ids() == []
    with pytest.raises(SessionError, match=r"no such run among the 0"):
        saved[run_id]


@pytest.mark.parametrize("half", [b'{"line":"steps","first', b'{"line":"name","name":"x\xc3'])
def test_a_half_written_line_hides_no_later_one(saved, half):
    """The disk was full while the run wrote it, perhaps within a letter."""
    with saved.begin(planned()) as file:
        file.add([block(0, 2.0, 1.5)])
    path = saved.folder / f"{file.run_id}.jsonl"
    path.write_bytes(path.read_bytes() + half)
    assert saved[file.run_id].name == "data"
    for name in ("first try", "second try"):
        saved.rename(file.run_id, name)
        assert saved[file.run_id].name == name and saved[file.run_id].losses == (2.0, 1.5)
    assert b"\n\n" not in path.read_bytes()


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
        file.add([replace(block(0, float("nan"), 0.5), values={"a/b": ((1, float("-inf")),)})])
    path = saved.folder / f"{file.run_id}.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600 and file.run_id.endswith("data-more-odd")
    head = json.loads(path.read_text().splitlines()[0])
    assert head["line"] == "run" and head["record"]["settings"]["seed"] == 3 and head["record"]["started"]
    steps = json.loads(path.read_text().splitlines()[1], parse_constant=pytest.fail)
    assert steps["losses"] == [None, 0.5] and steps["not_finite"]["/losses/0"] == "nan"
    (found,) = saved.messages(file.run_id)
    assert math.isnan(found.losses[0]) and found.losses[1] == 0.5 and found.values == {"a/b": ((1, float("-inf")),)}


def test_lines_of_older_files_have_nan_in_them(saved):
    with saved.begin(planned()) as file:
        file.add([block(0, 0.5)])
    path = saved.folder / f"{file.run_id}.jsonl"
    path.write_text(path.read_text().replace('"losses":[0.5]', '"losses":[NaN]'))
    assert math.isnan(saved.messages(file.run_id)[0].losses[0])


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
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SavedRuns("~/runs").folder == tmp_path / "runs"
    monkeypatch.chdir(tmp_path)
    assert SavedRuns("runs").folder == tmp_path / "runs", "also when the program changes its folder"


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "publish", lambda message: None)
    monkeypatch.setattr(shell, "commands", list)


def compared(keep: SavedRuns, log: Any = None, whole: Callable[[int], int] = int) -> CompareResult:
    data = (torch.randn(32, 4), torch.randn(32, 2))
    session: Any = SimulatedSession()
    return wb.compare(
        lambda: nn.Linear(4, 2), data, nn.functional.mse_loss, ["data", "model"], batch_size=whole(16), steps=whole(4),
        seed=whole(3), session=session, keep=keep, log=log, progress=False,
    )  # fmt: skip


class FullDisk(SavedRuns):
    """Its disk is full after the first lines."""

    def _begin(self, record: RunRecord) -> RunFile:
        return RunFile("begun", os.open("/dev/full", os.O_WRONLY), self._warn)


@pytest.mark.parametrize("is_given", [True, False])
def test_an_interrupt_names_the_folder_of_the_runs_that_have_ended(is_given, saved, simulated, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setenv(FOLDER_VARIABLE, str(saved.folder))
    keep = SavedRuns(saved.folder / "mine") if is_given else SavedRuns()
    monkeypatch.setattr(Comparison, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        compared(keep)
    place = str(raised.value).partition("Runs that have ended are kept: ")[2]
    assert place == (f"wb.draw.SavedRuns({str(saved.folder / 'mine')!r})" if is_given else "wb.draw.SavedRuns()")
    assert [run.name for run in eval(place, {"wb": wb})] == ["one device"]


def test_an_interrupt_of_the_check_ends_the_runs_file(saved, simulated, monkeypatch):
    """The file said that the run went on, and the writers of its log were left open."""
    closed = list[str | None]()
    log = SimpleNamespace(add=lambda step, values: None, close=closed.append)
    monkeypatch.setattr(Comparison, "record", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        compared(saved, lambda name, settings: log)
    assert closed == [None, "KeyboardInterrupt()"]
    assert {run.name: run.error for run in saved} == {"one device": None, "data": "KeyboardInterrupt()"}


def test_values_of_all_reports_are_kept_and_a_paused_run_is_called_so_where_cells_wait():
    first, second = (replace(block(2 * i, 2.0, 1.5), values={"rate": ((2 * i, 0.5),)}) for i in range(2))
    call: Any = Mock(messages=Mock(side_effect=[[(0, first), (0, RunEvent("paused", 2))], [(0, second)], []]))
    judge: Any = SimpleNamespace(record=lambda run, reports, observer: make_record("data"))
    run = TrainingRun(judge, planned(), Strategy("*: data"), call, None, RunLog((), "", {}))
    run.poll()
    call.describe.assert_called_with("training run 'data', which is paused")
    run.poll()
    call.describe.assert_called_with("training run 'data', step 4 of 10")
    assert run.result().values == {"rate": ((0, 0.5), (2, 0.5))}


def test_numbers_of_a_pandas_frame_are_whole_numbers(saved, simulated):
    """JSON does not take numpy's: the comparison ended with the file of its first run."""
    result = compared(saved, whole=np.int64)
    assert result.all_equal and len(list(saved)) == 3 and '"batch_size": 16' in result.to_json()


def test_a_run_that_failed_has_its_steps(saved):
    with saved.begin(planned()) as file:
        file.add([block(0, 2.0, 1.5)])
        file.finish(replace(planned(), error="rank 1 died"))
    assert saved[file.run_id].losses == (2.0, 1.5) and saved[file.run_id].error == "rank 1 died"


def test_a_folder_that_cannot_be_made_stops_no_run(tmp_path, simulated):
    (tmp_path / "file").write_text("")
    saved = SavedRuns(tmp_path / "file" / "runs")
    with pytest.warns(UserWarning, match=r"runs are not kept in .*file/runs.*keep=False") as warned:
        result = compared(saved)
    assert result.all_equal and len(result.runs) == 2 and len(warned) == 1
    assert {run.run_id for run in [*result.runs, *result.baselines]} == {""}
    assert saved.ids() == list(saved) == [] and "0 runs" in repr(saved)


def test_a_disk_that_gets_full_stops_no_run(tmp_path, simulated):
    with pytest.warns(UserWarning, match=r"not kept.*No space left") as warned:
        result = compared(FullDisk(tmp_path))
    assert result.all_equal and len(result.runs) == 2 and len(warned) == 1


def test_a_run_whose_file_broke_goes_on_without_an_id(saved):
    file = saved.begin(planned())
    run_id = file.run_id
    file.add([block(0, 2.0)])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._handle)
    os.close(full)
    with pytest.warns(UserWarning, match="not kept"):
        file.add([block(1, 1.5)])
    file.add([block(2, 1.25)])
    assert file.finish(make_record("data")).run_id == ""
    assert saved[run_id].losses == (2.0,)


def test_a_first_line_that_cannot_be_written_leaves_no_file(saved, monkeypatch):
    def full(handle: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.session.comparison.saved_runs.os.write", full)
    with pytest.warns(UserWarning, match="not kept"):
        file = saved.begin(planned())
    assert file.run_id == "" and saved.ids() == []


@pytest.mark.parametrize(
    "text", ["", '{"run": "data", "step": 1, "loss": 2.0}', "[1, 2]", "3", '{"line": ["run"]}', '{"line": "run"}',
             '{"line": "run", "record": {"title": "mine"}}', '{"line": "run", "record": [1]}', "\xff\n"],
)  # fmt: skip
def test_a_broken_or_foreign_file_hides_no_other_run(saved, text):
    finished = saved.begin(planned()).finish(make_record("data"))
    (saved.folder / "20200101-000000-foreign.jsonl").write_text(text + "\n")
    assert list(saved) == [finished] and len(saved) == 2
    assert saved.messages("20200101-000000-foreign") == []
    with pytest.raises(SessionError, match=r"holds no run of the workbench.*[Rr]emove the file"):
        saved["20200101-000000-foreign"]


def test_a_name_that_cannot_be_stored_is_in_the_table(saved, monkeypatch):
    run = saved.begin(planned()).finish(make_record("data"))
    table = RunTable(saved=saved)
    table.add([run])

    def refuse(run_id: str, name: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(saved, "rename", refuse)
    table.rename(run.run_id, "mine")
    assert [row.name for row in table.rows] == ["mine"] and "this table only" in table.answer.value
