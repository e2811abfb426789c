"""``workbench plan``: a file or a name in, a plan out."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.cli import main
from workbench.cli.plan import _model, parse_constraint
from workbench.core.strategy import Strategy
from workbench.errors import CommandError

FILE = """
import torch
from torch import nn

def model_fn():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))

def loss_fn(output, target):
    return nn.functional.cross_entropy(output, target)

dataset = (torch.zeros(8, 64), torch.zeros(8, dtype=torch.int64))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_file_is_planned(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--ranks",
        "2",
        "--batch",
        "8",
        "--constraint",
        "zero=0",
        "--why-not",
        "*: data | 3x1x1",
        "--explain",
        "2",
        "--table",
    ]
    assert main(["plan", str(file), *options]) == 0
    output = capsys.readouterr().out
    for words in ("plan for 2 layers on 2 ranks of a100", "every strategy was looked at", "cannot run", "step_s", "* "):
        assert words in output


def test_the_strategy_is_written_to_a_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.strategy"
    assert main(["plan", str(file), "--ranks", "2", "--batch", "8", "--out", str(out)]) == 0
    assert f"strategy written to {out}" in capsys.readouterr().out
    strategy = Strategy(out.read_text(encoding="utf-8"))
    assert str(strategy) + "\n" == out.read_text(encoding="utf-8")


def test_the_loss_is_part_of_the_model(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(
        FILE.replace("dataset = (torch.zeros(8, 64), torch.zeros(8, dtype=torch.int64))", "inputs = (2, 64)")
    )
    assert main(["plan", str(file), "--ranks", "2", "--batch", "8"]) == 2
    assert "TypeError in the loss on this batch" in capsys.readouterr().err


def test_a_transformer_is_meant_where_a_file_or_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    Path("gpt3-6.7b").write_text("no Python")
    assert [_model(name) for name in ("gpt2", "gpt3-6.7b")] == ["gpt2", "gpt3-6.7b"]


def test_mistakes_are_told(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.py").write_text("")
    for arguments, words in [
        (["plan"], "which model?"),
        (["plan", "gpt5"], "none of the known transformers"),
        (["plan", "GPT3"], "'gpt3-6.7b' or 'gpt3-13b' or 'gpt3-175b'"),
        (["plan", "gpt2", "--hardware", "V100"], "'v100-dgx1' or 'v100-dgx2'"),
        (["plan", "gpt2", "--memory", "0"], "above 0"),
        (
            ["plan", "gpt2", "--optimizer", "lion"],
            "optimizer='lion': it is one of adamw, adam, adamw8bit, momentum, sgd",
        ),
        (["plan", "gpt2", "--constraint", "offload=disk"], "offload='disk': it is one of none, optimizer, "),
        (["plan", str(tmp_path)], "not a Python file"),
        (["plan", str(tmp_path / "missing.py")], "not a Python file"),
        (["plan", str(tmp_path / "empty.py")], "needs model_fn"),
        (["plan", "gpt2", "--hardware", "abacus"], "abacus"),
        (["plan", "gpt2", "--constraint", "zero=1", "--constraint", "data=3"], "cannot be"),
        (["plan", "gpt2", "--constraint", "zero=1", "--constraint", "zero=2"], "'zero=2': zero is given twice."),
        (["plan", "gpt2", "--constraint", "recompute=some"], "it is one of none, full, attention, cheap, or a number"),
        (["plan", "gpt2", "--constraint", "recompute=0"], "recompute='0': it is one of none, "),
        (["plan", str(file), "--ranks", "2", "--batch", "2", "--memory", "0.0001"], "too much"),
    ]:
        assert main(arguments) == 2, arguments
        assert words in capsys.readouterr().err


def test_the_help_has_defaults_and_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for words in ("(default: a100-80g-selene)", "simulate --machines", "(default: throughput)", "(default: adamw)",
                  "recompute= (none, full, attention, cheap, or a number of blocks)",
                  "offload= (none, optimizer, "):  # fmt: skip
        assert words in said


def test_constraints_are_read() -> None:
    assert parse_constraint("zero=1,2") == ("zero", (1, 2))
    assert parse_constraint("pipeline=4") == ("pipeline", 4)
    assert parse_constraint("schedule=1f1b") == ("schedule", "1f1b")
    assert parse_constraint("recompute=no") == ("recompute", False)
    assert parse_constraint("recompute=cheap") == ("recompute", "cheap")
    assert parse_constraint("recompute=attention,cheap") == ("recompute", ("attention", "cheap"))
    assert parse_constraint("recompute=none, yes") == ("recompute", ("none", True))
    assert parse_constraint("offload=none,optimizer") == ("offload", ("none", "optimizer"))
    assert parse_constraint("layers=head: data@1; a.*: model") == ("layers", "head: data@1; a.*: model")
    assert parse_constraint("recompute=1") == ("recompute", 1) and parse_constraint("sequence=1") == ("sequence", True)
    for text in ("zero", "zero=", "zero=many", "sequence=cheap"):
        with pytest.raises(CommandError, match="--constraint"):
            parse_constraint(text)


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--models"]) == 0
    assert "gpt3-175b" in capsys.readouterr().out


def test_a_machine_that_is_not_known_is_told_before_the_model_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "slow.py"
    path.write_text("raise SystemExit('the file has run')")
    assert main(["plan", str(path), "--hardware", "h300"]) != 0
    assert "hardware 'h300'" in capsys.readouterr().err
