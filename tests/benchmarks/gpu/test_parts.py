"""The parts of ``benchmarks.gpu`` at small size without a GPU, and what becomes of one that fails."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext

import psutil
import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import engines, offloaded, steps
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.place import Finding, Found, Place
from benchmarks.gpu.runner import describe, run
from tests.processes import Ranks
from tests.session.simulated_session import SimulatedSession
from tests.timeouts import PROGRAM_TIMEOUT_S
from workbench.errors import StrategyError
from workbench.session.on_engine import shell

CPU = Place("cpu")
FINDS_ONE_AND = """
import os, pickle, subprocess, sys, time
from benchmarks.gpu.place import Finding
open(sys.argv[1], "wb", buffering=0).write(pickle.dumps(Finding("first", "seen")))
"""
FAILURES = {
    "raise ValueError('planned | here')": (PROGRAM_TIMEOUT_S, "exit code 1; .*ValueError: planned / here"),
    "os.kill(os.getpid(), 11)": (PROGRAM_TIMEOUT_S, "ended by signal 11"),
    "print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)": (5.0, r"not done after 5 s; (\d+)"),
}


def test_all_parts_end_within_20_minutes() -> None:
    assert sum(part.limit_s for part in PARTS) <= 20 * 60
    assert len({part.name for part in PARTS}) == len(PARTS)


COLLECTS = """
import pytest, torch
from benchmarks.gpu.tests_on_gpu import OTHERS
assert pytest.main(["--collect-only", "-q", "-m", "gpu", *OTHERS]) == 0
print("the accelerator's name:", torch._C._get_privateuse1_backend_name())
"""


@pytest.mark.slow
@pytest.mark.procs
def test_the_tests_on_a_gpu_register_no_device_of_their_own() -> None:
    """With one, torch finds no streams of CUDA in a backward."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECTS], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False
    )
    assert "test_on_gpu.py" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("the accelerator's name: privateuseone\n")


def ends(pid: int) -> bool:
    """Whether a process that was killed is gone, soon on a busy machine, too."""
    try:
        psutil.Process(pid).wait(timeout=60)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.procs
def test_a_part_that_fails_leaves_what_it_found_and_its_last_lines() -> None:
    """It may raise, crash, or hang with a child."""
    for code, (limit_s, expected) in FAILURES.items():
        outcome = run("a part", [sys.executable, "-c", FINDS_ONE_AND + code], limit_s)
        assert outcome.found == [Finding("first", "seen")]
        text = describe([outcome])
        assert "| first  | seen" in text and text.count("a part") == 1
        found = re.search(rf"FAILED \| {expected}", text)
        assert found, text
    child = int(found[1])
    assert ends(child)


@pytest.mark.procs
def test_the_program_goes_through_its_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--only", "versions", "nccl"])
    assert program.main() == 0
    said = capsys.readouterr().out
    assert said.count("Python, torch") == 2
    assert said.count("needs a GPU") == 2  # once as it goes, once in the table of all


def alone() -> list[list[Found]]:
    torch.cuda.set_sync_debug_mode = lambda mode: None  # type: ignore[assignment]
    steps.OUR_BACKENDS = {}
    return [list(part(CPU)) for part in (steps.times, steps.trace, steps.waits, offloaded.offload)]


@pytest.mark.slow
@pytest.mark.procs
def test_steps_in_a_world_of_one() -> None:
    with Ranks(alone, 1, joins=False) as ranks:
        [(times, trace, waits, offload)] = ranks.results()
    captured, *_, apart = times
    assert captured.theirs.startswith("plain torch") and float(apart.seen) < 1e-4
    assert [found.what for found in trace] == ["trace, local torch", "trace, as written", "trace, captured"]
    assert [found.what.removeprefix("waits in a step, ") for found in waits] == [*steps.STRATEGIES, "captured"]
    assert {found.seen for found in waits} == {"0"}
    assert [found.what for found in offload] == list(offloaded.PAIRS)
    assert all("losses differ by 0.0e+00" in found.seen for found in offload)


def test_strategies_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On simulated ranks: an engine of the workbench is tested elsewhere."""
    monkeypatch.setattr(shell, "publish", lambda message: None)
    monkeypatch.setattr(shell, "commands", list)
    monkeypatch.setattr(engines, "start", lambda place, num_engines: nullcontext(SimulatedSession(num_engines)))
    assert [found.seen.partition(",")[0] for found in engines.compared(CPU, 2)] == ["equal"] * 4
    monkeypatch.setattr(engines, "STRATEGIES", {"unfit": "no_such_layer: data"})
    with pytest.raises(StrategyError):
        list(engines.compared(CPU, 2))


@pytest.mark.engines
@pytest.mark.slow
def test_engines_are_interrupted_and_killed() -> None:
    interrupted, killed, afterwards = engines.interrupt_and_kill(CPU)
    assert interrupted.what == "interrupted" and "rank 1" in killed.seen and afterwards.what == "afterwards"


@pytest.mark.procs
@pytest.mark.slow
def test_the_script_of_the_readme_runs_alone() -> None:
    (found,) = engines.script(CPU)
    assert isinstance(found, Finding) and found.seen.startswith("0 ")
