"""``workbench demo`` and ``workbench compare``: the job they run, and how its result is shown."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.cli import compare, demo, main, results
from workbench.core.metrics import RunRecord
from workbench.core.options import PRESETS
from workbench.core.verdict import Verdict
from workbench.errors import CommandError
from workbench.session.comparison.compare import CompareResult


def record(name: str, **changes: object) -> RunRecord:
    values = {
        "name": name,
        "strategy": f"*: {name}",
        "num_ranks": 2,
        "batch_size": 8,
        "losses": (2.0, 1.0),
        "step_times_s": (0.01, 0.01),
        "samples_per_s": 800.0,
        "speedup": 1.5,
        "peak_memory_bytes": (1_000_000, 2_000_000),
        "memory_by_kind": ({"parameters": 10}, {"parameters": 10}),
        "loss_difference": 2e-7,
        "weight_difference": 1e-8,
        "equal": True,
    }
    return RunRecord(**(values | changes))


def result_of(*runs: RunRecord) -> CompareResult:
    return CompareResult(record("one device", num_ranks=1, equal=None, loss_difference=None), list(runs))


def test_digits_are_the_real_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # to load it takes seconds
    images, classes = demo.digits()
    assert images.shape == (1797, 64)
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert classes.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_network_has_four_named_layers() -> None:
    model = demo.make_mlp()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")}
    assert shapes == {
        "fc1.weight": (256, 64),
        "fc2.weight": (256, 256),
        "fc3.weight": (128, 256),
        "head.weight": (10, 128),
    }
    assert model(torch.zeros(3, 64)).shape == (3, 10)


def test_seeds_are_a_number_or_a_list() -> None:
    parser = argparse.ArgumentParser()
    results.add_run_arguments(parser, batch_size=8)
    asked = {text: parser.parse_args(["--seeds", text]).seeds for text in ("3", "0,7")}
    assert asked == {"3": 3, "0,7": [0, 7]} and parser.parse_args([]).seeds == 1
    for text in ("0", "x", "1,x", ""):
        with pytest.raises(SystemExit):
            parser.parse_args(["--seeds", text])


def test_runs_of_several_seeds_are_printed_as_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [record(name, strategy="*: data", settings={"seed": n}) for n, name in enumerate(("data", "data, seed 1"))]
    assert results.present(result_of(*runs, record("model")), report=None) == results.EQUAL
    said = capsys.readouterr().out
    assert "All 2 strategies train as one device does." in said
    assert "loss 1.00 \u00b1 0, 2 seeds" in said or "loss 1.00 \u00b1 0.0" in said
    wrong = record("data, seed 2", settings={"seed": 2}, equal=False)
    assert results.present(result_of(*runs, wrong), report=None) == results.UNEQUAL
    assert "data, seed 2: does not train as one device does" in capsys.readouterr().out


def test_equal_runs_exit_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, data = tmp_path / "out" / "report.html", tmp_path / "data" / "result.json"
    assert results.present(result_of(record("data"), record("model")), report, data) == results.EQUAL
    said = capsys.readouterr().out
    assert "All 2 strategies train as one device does." in said
    assert "*: model" in said
    assert "<html" in report.read_text(encoding="utf-8")
    assert CompareResult.from_json(data.read_text(encoding="utf-8")).runs[1].name == "model"


def test_the_verdict_is_printed_though_a_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CommandError, match=r"--json .*: cannot write .*: Is a directory"):
        results.present(result_of(record("data"), record("model")), None, tmp_path)
    assert "All 2 strategies train as one device does." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"equal": False, "verdict": Verdict(False, text="the loss of step 2 differs by 1e-3")},
            "bad: does not train as one device does: the loss of step 2 differs by 1e-3.",
        ),
        ({"equal": False}, "bad: does not train as one device does: its losses or weights differ."),
        ({"equal": None, "loss_difference": None}, "bad: was not compared with one device."),
        (
            {"equal": None, "verdict": Verdict(None, text="the loss is nan on both", note="both nan")},
            "bad: has no verdict: the loss is nan on both.",
        ),
        ({"equal": None, "error": "rank 1 raised\nmore"}, "bad: did not run: rank 1 raised."),
    ],
)
def test_a_run_that_differs_is_named_and_exits_with_1(
    changes: dict[str, object], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = results.present(result_of(record("good"), record("bad", **changes)), report=None)
    said = capsys.readouterr().out
    assert code == results.UNEQUAL
    assert sentence in said
    assert "good: " not in said
    assert "All " not in said


def test_strategies_that_are_their_own_names_need_no_legend(capsys: pytest.CaptureFixture[str]) -> None:
    text = "fc1: data@0; fc2: data@1 | mb=4 1f1b"
    results.present(result_of(record("data"), record(text, strategy=text)), report=None)
    said = capsys.readouterr().out
    assert "\n  data  *: data\n" in said and said.count(text) == 1


JOB = """
import torch
from helper import width

def model_fn():
    return torch.nn.Linear(width, 2)

def dataset():
    return torch.zeros(8, width), torch.zeros(8, dtype=torch.long)

loss_fn = torch.nn.functional.cross_entropy
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(compare.sys, "path", list(compare.sys.path))
    (tmp_path / "helper.py").write_text("width = 4")
    path = tmp_path / "mine.py"
    path.write_text(JOB)
    yield path
    compare.sys.modules.pop("helper", None)
    compare.sys.modules.pop(compare._MODULE_NAME, None)


def test_a_file_gives_the_job(job_file: Path) -> None:
    job = compare.load_job(job_file)
    assert job["model_fn"]().in_features == 4
    assert job["dataset"][0].shape == (8, 4)
    assert job["loss_fn"] is torch.nn.functional.cross_entropy
    assert job["optimizer_fn"] is None


def test_a_file_may_say_how_samples_become_a_batch(job_file: Path) -> None:
    assert compare.load_job(job_file)["collate_fn"] is None
    job_file.write_text(JOB + "\ncollate_fn = list\ndef count(inputs, targets): return 3\n")
    job = compare.load_job(job_file)
    assert job["collate_fn"] is list and job["count"](None, None) == 3


def test_functions_of_the_file_travel_by_value(job_file: Path) -> None:
    import cloudpickle

    payload = cloudpickle.dumps(compare.load_job(job_file)["model_fn"])
    compare.sys.modules.pop(compare._MODULE_NAME)
    assert cloudpickle.loads(payload)().out_features == 2


def test_a_dataset_may_be_a_value(job_file: Path) -> None:
    job_file.write_text(JOB.replace("def dataset():\n    return", "dataset ="))
    assert compare.load_job(job_file)["dataset"][0].shape == (8, 4)


def test_missing_names_are_told(job_file: Path) -> None:
    job_file.write_text("def model_fn(): ...")
    with pytest.raises(CommandError, match=r"dataset not defined there.*loss_fn unless the model returns its own"):
        compare.load_job(job_file)


@pytest.mark.parametrize("name", ["missing.py", "notes.txt", "."])
def test_what_is_no_python_file_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CommandError, match="not a Python file"):
        compare.load_job(tmp_path / name)


def test_the_network_that_wins_has_two_convolutions() -> None:
    model = demo.make_cnn()
    names = [name for name, module in model.named_children() if list(module.parameters())]
    assert names == ["conv1", "conv2", "fc", "head"]
    assert model(torch.zeros(3, 64)).shape == (3, 10)
    assert next(iter(demo.NETWORKS.values())) is demo.make_cnn  # its table comes first, and its report is written


def test_the_threads_of_both_sides_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(record("data"))
    results.present(replace(result, settings={"engines": 2, "threads": 1}), None)
    assert "2 engines with 1 thread each; one device is one of them with 1 thread" in capsys.readouterr().out
    results.present(result, None)
    assert "thread" not in capsys.readouterr().out


def test_defaults_of_the_commands() -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    args = parser.parse_args([])
    assert (args.engines, args.steps, args.batch, args.seed) == (2, 20, 128, 0)
    assert args.out == Path("out/report.html")


@pytest.mark.slow  # tests/test_wheel.py runs the same demo, with fewer steps
@pytest.mark.engines
def test_demo_runs_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The main job on engines: four strategies, 20 steps, all equal to one device."""
    report, data = tmp_path / "report.html", tmp_path / "result.json"
    code = main(["demo", "--out", str(report), "--json", str(data)])
    said = capsys.readouterr().out
    runs = json.loads(data.read_text(encoding="utf-8"))["runs"]
    assert code == 0, said
    assert [run["name"] for run in runs] == list(PRESETS)
    assert all(run["verdict"]["equal"] for run in runs)
    assert all(len(run["losses"]) == 20 and run["losses"][-1] < run["losses"][0] for run in runs)
    assert all(name in report.read_text(encoding="utf-8") for name in PRESETS)


@pytest.mark.slow  # the demo goes the same way
@pytest.mark.engines
def test_compare_runs_a_file_end_to_end(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["compare", str(job_file), "data", "*: model", "--steps", "3", "--batch", "8"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "All 2 strategies train as one device does." in said


OWN_LOSS = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, ids, labels):
        logits = self.head(self.table(ids))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

model_fn = Words
dataset = {"ids": torch.arange(60).view(12, 5) % 11, "labels": torch.arange(1, 61).view(12, 5) % 11}
"""


@pytest.mark.engines
@pytest.mark.slow  # tests/session/test_own_losses.py has such a model on the engines of other tests
def test_compare_runs_a_model_with_its_own_loss(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_file.write_text(OWN_LOSS)
    code = main(["compare", str(job_file), "data", "pipeline", "--steps", "3", "--batch", "7"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "All 2 strategies train as one device does." in said
