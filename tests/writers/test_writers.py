"""Writers of logs: what each one leaves behind, names that are wrong, and writers that fail or are slow."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tests.docs.pages import ROOT, blocks
from workbench.core.metrics import StepBlock
from workbench.core.profile import Profile, RankPart, RankProfile
from workbench.errors import RunError
from workbench.writers import choose, kinds, run_log
from workbench.writers.choose import writers
from workbench.writers.profile_files import fill
from workbench.writers.run_log import RunLog

SETTINGS = {"strategy": "*: data", "batch_size": 64}


def block(first_step: int = 0, loss: float = 0.5, **values) -> StepBlock:
    """Two steps of 64 samples in 0.25 s, with values of the first one."""
    pairs = {name: ((first_step, value),) for name, value in values.items()}
    times = ((0.25, 0.25),)
    return StepBlock(first_step, (64, 64), (loss, loss / 2), times, times, ((0, 0),), values=pairs)


def write(log, *blocks: StepBlock, name: str = "data", error: str | None = None) -> None:
    writing = RunLog(writers(log), name, SETTINGS)
    writing.add(blocks)
    writing.close(error)


def lines_of(path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_json_lines(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    write(f"jsonl:{path}", block(accuracy=0.75), block(2, math.nan, gradient_norm=math.inf))
    write(f"jsonl:{path}", name="model", error="rank 1 failed")
    settings, first, second, broken, *rest = lines_of(path)
    assert settings == {"run": "data", "settings": SETTINGS}
    assert first == {"run": "data", "step": 1, "loss": 0.5, "samples_per_s": 256.0, "accuracy": 0.75}
    assert second == {"run": "data", "step": 2, "loss": 0.25, "samples_per_s": 256.0}
    assert broken["loss"] is None and broken["not_finite"] == {"loss": "nan", "gradient_norm": "inf"}
    assert [line["run"] for line in rest] == ["data", "model", "model"] and rest[-1]["error"] == "rank 1 failed"


def test_each_run_has_its_own_file_in_a_folder(tmp_path):
    for name in ("data", "encoder*: data@0"):
        write(f"jsonl:{tmp_path}/", block(), name=name)
    assert sorted(path.name.rsplit("-", 2)[0] for path in tmp_path.iterdir()) == ["data", "encoder-data-0"]


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_runs_that_begin_at_once_share_nothing(kind, tmp_path):
    """Programs of a sweep, started in one second."""
    pytest.importorskip("tensorboard" if kind == "tensorboard" else "json")
    begin = writers(f"{kind}:{tmp_path}/")[0]
    for run in [begin("loop", {}) for _ in range(3)]:
        run.add(1, {"loss": 1.0})
        run.close(None)
    found = list(tmp_path.iterdir())
    assert len(found) == 3
    assert kind == "jsonl" or all(len(list(folder.iterdir())) == 1 for folder in found)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(f"tensorboard:{tmp_path}", block(accuracy=0.75))
    [folder] = tmp_path.iterdir()
    found = EventAccumulator(str(folder)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert [event.value for event in found.Scalars("accuracy")] == [0.75]
    assert "batch_size: 64" in str(found.Tensors("settings/text_summary")[0].tensor_proto)


def test_a_program_that_changes_its_folder_moves_no_run_of_tensorboard(tmp_path, monkeypatch):
    """With a substitute for its writer, which opens its file by its name for each write."""
    made = []
    substitute = SimpleNamespace(SummaryWriter=lambda folder: made.append(Path(folder)) or MagicMock())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", substitute)
    monkeypatch.chdir(tmp_path)
    kinds.EventFiles("", "data", SETTINGS)
    assert made[0].parent == tmp_path / "runs"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own database
def test_mlflow(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    place = tmp_path / "mlflow.db"
    write(f"mlflow:{place}", block(**{"accuracy@5": 0.75}), error="rank 1 failed")
    client = MlflowClient(f"sqlite:///{place}")
    [run] = client.search_runs([client.get_experiment_by_name("workbench").experiment_id])
    assert run.info.run_name == "data" and run.info.status == "FAILED" and run.data.params["batch_size"] == "64"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.25)]
    assert run.data.metrics["accuracy_5"] == 0.75


@pytest.mark.parametrize(
    ("place", "file"), [("runs.db", "runs.db"), ("runs", "runs/mlflow.db"), ("http://here:5000", "")]
)
def test_places_of_mlflow(place, file, tmp_path, monkeypatch):
    """With a substitute for the package, which refuses folders of files since 2026."""
    stores, calls, logged = [], [], []

    class Client:
        def __init__(self, tracking_uri):
            stores.append(tracking_uri)

        get_experiment_by_name = create_run = MagicMock()

        set_terminated = MagicMock()

        def log_batch(self, run, metrics=(), params=()):
            assert len(metrics) <= 1000
            calls.append(len(metrics))
            logged.extend(metrics)

    tracking = SimpleNamespace(MlflowClient=Client)
    entities = SimpleNamespace(Param=lambda *values: values, Metric=lambda *values: values)
    for name, module in (("mlflow", SimpleNamespace()), ("mlflow.tracking", tracking), ("mlflow.entities", entities)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    writer = kinds.MLflow(place, "data", SETTINGS)
    writer.add(3, {"accuracy@5": 0.75, "evaluation/f1-score": 0.5})
    assert stores == [f"sqlite:///{tmp_path / file}" if file else place]
    assert [(name, value, step) for name, value, _, step in logged] == [
        ("accuracy_5", 0.75, 3), ("evaluation/f1-score", 0.5, 3),
    ]  # fmt: skip
    monkeypatch.setattr(kinds, "_MLFLOW_INTERVAL_MS", 3_600_000)
    for step in range(4, 3004):
        writer.add(step, {"loss": 0.5, "learning_rate": 0.1})
    writer.close(None)
    assert [step for _, _, _, step in logged[2::2]] == list(range(4, 3004))
    assert len(calls) < 12, "a call for each step would take longer than fast steps"


def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    write("wandb:mine", block(accuracy=0.75))
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert all(part in file.read_bytes() for part in (b"accuracy", b"0.75", b"samples_per_s", b"256", b"batch_size"))


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # its package reads it when it is imported
    pytest.importorskip("trackio")
    write("trackio:mine", block(accuracy=0.75))
    rows = sqlite3.connect(tmp_path / "mine.db").execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(values)["loss"]) for step, values in rows] == [(1, 0.5), (2, 0.25)]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("tensorbord:runs/", ("log='tensorbord:runs/'", "Did you mean 'tensorboard'?", "jsonl, mlflow")),
        (3, ("log=3", "int")),
        (["jsonl", None], ("log=None",)),
        ("missing:place", ("the package no_such_package is not installed", "pip install no_such_package")),
    ],
)
def test_a_wrong_log_says_what_is_right(log, words, monkeypatch):
    monkeypatch.setitem(choose.WRITERS, "missing", (Broken, "no_such_package"))
    with pytest.raises(RunError) as error:
        writers([log] if isinstance(log, int) else log)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_every_extra_is_one_of_the_project(pytestconfig):
    text = (pytestconfig.rootpath / "pyproject.toml").read_text()
    assert all(f"\n{package} = [" in text for _, package in choose.WRITERS.values() if package)


class Broken:
    """A writer that fails in its second step, as on a full disk, or when it begins."""

    def __init__(self, name, settings):
        if name == "at once":
            raise ConnectionError("no server")
        self.rows: list[int] = []

    def add(self, step, values):
        self.rows.append(step)
        if step == 2:
            raise OSError(28, "No space left on device")

    def close(self, error):
        raise OSError(28, "No space left on device, still")


def test_the_writer_of_the_guide_takes_a_step_that_comes_twice(capsys):
    guide = (ROOT / "docs" / "guides" / "logs.md").read_text("utf-8")
    (code,) = (block.code for block in blocks(guide) if "class Printed" in block.code)
    names = {}
    exec(code, names)
    log = RunLog([names["Printed"]], "data", SETTINGS)
    log.add([block(), StepBlock(2, (), (), (), (), (), values={"accuracy": ((1, 0.75),)})])
    log.close()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "data 2 {'loss': 0.25, 'samples_per_s': 256.0}", "data 2 {'accuracy': 0.75}",
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "reason"), [("data", "No space left"), ("at once", "ConnectionError: no server")])
def test_a_writer_that_fails_warns_once_and_the_others_go_on(name, reason, tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = RunLog(writers([Broken, f"jsonl:{path}"]), name, SETTINGS)
    with pytest.warns(UserWarning, match=reason) as warned:  # noqa: PT031 - where it warns depends on the thread
        for step in (0, 2, 4):
            log.add([block(step)])
        log.close()
    assert len(warned) == 1 and "run goes on" in str(warned[0].message)
    assert [line["step"] for line in lines_of(path)[1:]] == [1, 2, 3, 4, 5, 6]


def test_a_full_disk(tmp_path):
    log = RunLog(writers("jsonl:/dev/full"), "data", SETTINGS)
    with pytest.warns(UserWarning, match="No space left on device"):
        log.close()


def test_the_end_of_a_run_waits_for_a_writer_that_still_begins(monkeypatch, tmp_path):
    monkeypatch.setattr(run_log, "CLOSE_S", 0.05)
    (begin,) = writers(f"jsonl:{tmp_path}/metrics.jsonl")

    def slow(name, settings):
        time.sleep(0.3)
        return begin(name, settings)

    log = RunLog([slow], "data", SETTINGS)
    log.add([block()])
    log.close()
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")[1:]] == [1, 2]


def test_a_writer_that_never_returns_holds_no_run_up(monkeypatch):
    monkeypatch.setattr(run_log, "BEGIN_S", 0.05)
    gate = threading.Event()
    log = RunLog([lambda name, settings: gate.wait(10)], "data", SETTINGS)
    log.add([block()])
    with pytest.warns(UserWarning, match="not begun after"):
        log.close()
    gate.set()


def test_profiles_whose_names_have_dots_keep_their_own_snapshots(tmp_path):
    for name in ("run-0.1.json", "run-0.2.json.gz", "step"):
        part = RankPart(RankProfile(0, 3, 1.0, 0.5, 0.5, 0.2, 0.2), zlib.compress(b"{}"), 2, 3, snapshot=name.encode())
        fill(profile := Profile(), [part], tmp_path / name, "cuda", "")
        assert [file.read_bytes() for file in profile.snapshots] == [name.encode()]
    found = sorted(file.name for file in tmp_path.glob("*.pickle"))
    assert found == [f"{stem}-memory-rank0.pickle" for stem in ("run-0.1", "run-0.2", "step")]
