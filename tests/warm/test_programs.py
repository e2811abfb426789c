"""The warm Python does what ``python`` does; `PROGRAMS` run under both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.timeouts import PROGRAM_TIMEOUT_S, wait_until
from tests.warm import executable

pytestmark = pytest.mark.procs

PROGRAMS = {
    "prints": ["-c", "import sys; print(sys.argv, __name__, sys.stdin.read()); print('told', file=sys.stderr)", "a b"],
    "exits": ["-c", "raise SystemExit(7)"],
    "exits with words": ["-c", "import sys; sys.exit('words')"],
    "is killed": ["-c", "import os; print('begun', flush=True); os.kill(os.getpid(), 9)"],
    "a module": ["-m", "json.tool", "--compact"],
    "unbuffered": ["-u", "-c", "import os; print('begun'); os._exit(3)"],
    "where it runs": ["-c", "import os, sys; print(os.getcwd(), os.environ['GIVEN'], sys.path[0])"],
    "at its end": ["-c", "import atexit; atexit.register(print, 'last'); print('first')"],
    "a script": ["script.py", "1"],
    "raises": ["-c", "1 / 0"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_do_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("value = 3")
    (tmp_path / "script.py").write_text("import sys, other\nprint(sys.argv, other.value, __name__, __file__)")
    cold, warm = (
        subprocess.run(
            [python, *PROGRAMS[name]],
            input="[1, 2]", capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "GIVEN": "x"},
            timeout=PROGRAM_TIMEOUT_S, check=False,
        )
        for python in (sys.executable, executable())
    )  # fmt: skip
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_torch_is_there_unless_variables_are_read_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")  # as it is where this process has compiled something
    program = ["-c", "import sys; print('torch' in sys.modules, sys.executable)"]
    path = {"PYTHONPATH": "/nowhere"}
    for variables, is_there, python in ((path, True, executable()), ({"PYTHONHASHSEED": "5"}, False, sys.executable)):
        done = subprocess.run(
            [executable(), *program], env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True
        )
        assert done.stdout.split() == [str(is_there), python]


@pytest.mark.parametrize("name", ["from a path", "of a script"])
def test_modules_are_found_where_the_variable_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "other.py").write_text("value = 3")
    (tmp_path / "script.py").write_text("import sys, other\nprint(sys.path, other.value)")
    program = {"from a path": ["-c", "import sys, other; print(sys.path, other.value)"], "of a script": ["script.py"]}[
        name
    ]
    found = [
        subprocess.run(
            [python, *program], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=PROGRAM_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["far", "/nowhere"])},
        ).stdout
        for python in (sys.executable, executable())
    ]  # fmt: skip
    assert found[0] == found[1] and "/nowhere" in found[0]


@pytest.mark.slow
def test_the_first_program_does_not_choose_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_TEST_PYTHON")
    program = ["-c", "import sys; print('torch' in sys.modules)"]
    for variables, is_there in (({"PYTHONHASHSEED": "5"}, "False\n"), ({}, "True\n")):
        done = subprocess.run(
            [executable(), *program], env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True
        )
        assert done.stdout == is_there


def test_a_signal_reaches_the_program_which_ends_with_its_command() -> None:
    program = (
        "import os, time\ntry:\n print(os.getpid(), flush=True)\n while 1: time.sleep(0.1)\nexcept KeyboardInterrupt: "
    )
    for number, last in ((signal.SIGINT, "print('interrupted')"), (signal.SIGTERM, "pass"), (signal.SIGKILL, "pass")):
        command = [executable(), "-c", program + last]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            process.send_signal(number)
            is_interrupted = number == signal.SIGINT
            assert process.wait(PROGRAM_TIMEOUT_S) == (0 if is_interrupted else -number)
            assert process.stdout.read() == ("interrupted\n" if is_interrupted else "")
        wait_until(lambda pid=pid: not psutil.pid_exists(pid))


def test_a_command_that_is_killed_early_ends_itself_alone() -> None:
    """Before it has its answer, its request whole, or anything: its program ends too, and the server serves on."""
    assert subprocess.run([executable(), "-c", ""], check=True).returncode == 0
    folder = Path(executable()).parent
    request = {
        "arguments": ["-c", "import time; time.sleep(600)"], "buffers": True, "environment": {}, "folder": "/",
        "files": [], "ignores_interrupts": False, "umask": 0o77, "cores": [0],
    }  # fmt: skip
    text = json.dumps(request).encode()
    whole = b"%12d" % len(text) + text
    for said in (whole, whole[:-1], whole[:12], b""):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / "socket"))
            connection.sendall(said)
        assert subprocess.run([executable(), "-c", ""], check=False, timeout=PROGRAM_TIMEOUT_S).returncode == 0
