"""The command line: what it understands, what it says, how it exits."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

import workbench
from workbench import cli
from workbench.cli import lab, outputs
from workbench.cli.compare import telling_mistakes_of
from workbench.core.extras import packages_of
from workbench.errors import CommandError, StrategyError

COMMANDS = tuple(cli._COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"workbench {command}" in capsys.readouterr().out


def test_the_reference_shows_the_help_of_every_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api" / "commands.md").read_text("utf-8")
    assert sorted(re.findall(r"^<!-- help: (\w+) -->$", page, re.MULTILINE)) == sorted(COMMANDS)


def test_python_m_workbench_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "workbench", "--help"], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in COMMANDS)


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"workbench {workbench.__version__}\n")


@pytest.mark.parametrize("arguments", ["", "train", "demo --engines 0", "demo --steps x", "compare"])
def test_what_it_does_not_understand_ends_with_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    assert ended.value.code == cli.USER_ERROR
    assert "usage: workbench" in capsys.readouterr().err


def test_an_unknown_option_is_told_with_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "gpt2", "--gpus", "8"])
    assert ended.value.code == cli.USER_ERROR
    told = capsys.readouterr().err
    assert told.startswith("usage: workbench plan") and "--ranks" in told
    assert "unrecognized arguments: --gpus 8 (workbench plan --help lists all)" in told


def test_our_errors_are_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for said in ("2 stages, 1 layer.", "workbench doctor: 2 stages, 1 layer."):
        monkeypatch.setattr(cli.doctor, "run", raising(StrategyError(said)))
        assert cli.main(["doctor"]) == cli.USER_ERROR
        assert capsys.readouterr().err == "workbench doctor: 2 stages, 1 layer.\n"


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.doctor, "run", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


@pytest.mark.parametrize("text", ["", "Runs that have ended are kept: wb.draw.SavedRuns()"])
def test_interrupt_has_its_own_exit_code(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.doctor, "run", raising(KeyboardInterrupt(text)))
    assert cli.main(["doctor"]) == cli.INTERRUPTED
    assert capsys.readouterr().err.strip() == text


@pytest.mark.parametrize("arguments", ["--help", "simulate --machines"])
def test_output_that_nothing_reads_ends_a_command_quietly(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        command = [sys.executable, "-m", "workbench", *arguments.split()]
        buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # else argparse itself drops the error of a help text
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False, env=buffered)
    assert (done.returncode, done.stderr) == (cli.OUTPUT_CLOSED, "")


def test_another_closed_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli.doctor, "run", raising(BrokenPipeError()))
    with (tmp_path / "out").open("w") as file:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, file)
        with pytest.raises(BrokenPipeError):
            cli.main(["doctor"])
        monkeypatch.undo()


def test_lab_opens_the_first_notebook() -> None:
    notebook = lab.find_notebook(None)
    assert notebook.name == lab.FIRST_NOTEBOOK
    command = lab.lab_command(notebook, ["--no-browser"])
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--LabApp.default_url=/lab/tree/{notebook.name}" in command and command[-1] == "--no-browser"


def test_lab_copies_the_notebooks_of_an_installed_package_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a wheel has them is seen in tests/test_wheel.py."""
    packed = tmp_path / "share" / "workbench" / lab.FIRST_NOTEBOOK
    packed.parent.mkdir(parents=True)
    packed.write_text("as it came")

    class Packed(PurePosixPath):
        def locate(self) -> Path:
            return Path(self)

    monkeypatch.setattr(lab, "files", lambda _name: [Packed(packed), Packed(tmp_path / "workbench" / "other.ipynb")])
    monkeypatch.setattr(lab, "CHECKOUT", tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    notebook = lab.find_notebook(None)
    assert notebook.read_text() == "as it came" and len(list(notebook.parent.iterdir())) == 1
    notebook.write_text("changed by the user")
    assert lab.find_notebook(None).read_text() == "changed by the user"


def test_lab_says_where_it_cannot_copy_the_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / lab.COPIES).touch()
    monkeypatch.setattr(lab, "CHECKOUT", tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match=r"workbench-notebooks, and cannot be: File exists\. Call it from"):
        lab.find_notebook(None)


def test_lab_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"no notebook at .*missing\.ipynb\. Name one"):
        lab.find_notebook(tmp_path / "missing.ipynb")


def test_lab_replaces_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook = tmp_path / "my own.ipynb"
    notebook.touch()
    started: list[list[str]] = []

    def execv(_path: str, command: list[str]) -> None:
        started.append(command)
        raise SystemExit(0)  # the real one does not return either

    monkeypatch.setattr(lab.os, "execv", execv)
    with pytest.raises(SystemExit):
        cli.main(["lab", "--no-browser", "--notebook", str(notebook), "--", "--port=9999"])
    assert started[0][-4:] == [
        f"--ServerApp.root_dir={tmp_path}",
        "--LabApp.default_url=/lab/tree/my%20own.ipynb",
        "--no-browser",
        "--port=9999",
    ]


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [("demo", "sklearn", "demo"), ("lab", "jupyterlab", "demo"), ("lab --notebook mine.ipynb", "jupyterlab", "lab")],
)
def test_what_is_not_installed_is_told_with_the_command_that_installs_it(
    command: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    assert cli.main(command.split()) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(f"workbench {command.split()[0]}: {module} not installed here")
    assert {"pip", "install", *packages_of(extra)} <= set(shlex.split(said.partition("needs: ")[2]))
    assert "workbench" not in said.partition("needs: ")[2], "another project on PyPI has this name"


@pytest.mark.parametrize("name", ["", "file/report.html"])
@pytest.mark.parametrize(
    "command",
    ["demo --out", "demo --json", "compare no.py --out", "compare no.py --json", "plan no.py --out",
     "script no.py data --out", "simulate --table no.csv --out"],
)  # fmt: skip
def test_an_output_that_cannot_be_written_is_told_before_anything_is_done(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "no.py").touch()  # the error is not about its contents
    path, option = tmp_path / name, command.split()[-1]
    assert cli.main([*command.replace("no.py", str(tmp_path / "no.py")).split(), str(path)]) == cli.USER_ERROR
    why = f"{path}: Is a directory" if not name else f"{path.parent}: File exists"
    assert f": {option} {path}: cannot write {why}. Give the path of another file." in capsys.readouterr().err


def test_an_output_is_checked_without_a_write(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.strategy"
    outputs.check_output("--out", path)
    assert path.parent.is_dir() and not path.exists()
    path.write_text("as it was")
    outputs.check_output("--out", path)
    assert path.read_text() == "as it was"
    outputs.check_output("--out", None)


RUNS_A_FILE = pytest.mark.parametrize("command", ["compare {}", "plan {}", "script {} data"])
"""Commands with a user's file."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path of a user's file, and of no module."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "mine_of_commands.py"
    sys.modules.pop("mine_of_commands", None)


@RUNS_A_FILE
def test_a_file_that_is_not_python_is_told_with_its_line(
    command: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("import torch\n\ndef model_fn(:\n", encoding="utf-8")
    assert cli.main(command.format(file).split()) == cli.USER_ERROR
    name = command.split()[0]
    assert capsys.readouterr().err == f"workbench {name}: {file}, line 3: invalid syntax: def model_fn(:\n"


@RUNS_A_FILE
def test_an_error_of_a_file_is_told_with_its_own_lines(
    command: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("import torch\nimport nosuchmodule\n", encoding="utf-8")
    assert cli.main(command.format(file).split()) == cli.USER_ERROR
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"workbench {command.split()[0]}: {file} raised an error."
    assert said[2] == f'  File "{file}", line 2, in <module>' and "nosuchmodule" in said[-1]
    assert sum(line.startswith("  File") for line in said) == 1


@pytest.mark.parametrize("command", ["compare {}", "plan {}"])
def test_an_error_of_its_data_set_too(command: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("model_fn = loss_fn = len\ndef dataset(): return open('no.csv')\n", encoding="utf-8")
    assert cli.main(command.format(file).split()) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert said.count("  File") == 1 and "line 2, in dataset" in said


@RUNS_A_FILE
def test_an_error_of_its_model_too(command: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("dataset = [1] * 64, [1] * 64\nloss_fn = len\ndef model_fn(): return open('no.csv')\n")
    assert cli.main(command.format(file).split()) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert said.count("  File") == 1 and "line 3, in model_fn" in said


def test_errors_of_our_own_are_not_those_of_a_file(file: Path) -> None:
    with pytest.raises(KeyError), telling_mistakes_of(file):
        raise KeyError


@pytest.mark.parametrize("command", ["demo", "compare no.py"])
def test_two_outputs_are_two_files(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "report")
    assert cli.main([*command.split(), "--out", path, "--json", path]) == cli.USER_ERROR
    assert f"--out and --json are both {path}, and one would replace the other." in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "script mine.py data --out mine.py",
        "script mine.py it.strategy --out ./it.strategy",
        "plan mine.py --out mine.py",
        "plan gpt2 --why-not it.strategy --out it.strategy",
        "compare mine.py --out mine.py",
        "compare mine.py data it.strategy --json link.strategy",
        "simulate --table mine.py --out mine.py",
    ],
)
def test_no_output_replaces_an_input(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "it.strategy"):
        Path(name).write_text("model_fn = dataset = None\n", encoding="utf-8")
    Path("link.strategy").symlink_to("it.strategy")
    assert cli.main(command.split()) == cli.USER_ERROR
    assert "this is a file that the command reads, and it would be replaced" in capsys.readouterr().err
    assert Path(command.split()[-1]).read_text(encoding="utf-8") == "model_fn = dataset = None\n"


@pytest.mark.parametrize("name", ["random", "time", "__main__"])
def test_a_file_whose_name_imports_another_module_makes_no_script(
    name: str, tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text("model_fn = dataset = None\n", encoding="utf-8")
    assert cli.main(["script", str(file), "data"]) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert f"{file}: a script that imports '{name}' gets " in said and "Give the file another name." in said


def raising(error: BaseException):
    def run(_args: object) -> int:
        raise error

    return run
