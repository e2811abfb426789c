"""torchrun starts the ranks again after one was killed: they go on from the newest checkpoint, with the same losses."""

import contextlib
import io
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.processes import run_processes
from tests.timeouts import PROGRAM_TIMEOUT_S
from tests.warm import executable

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "guides" / "restarts.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
(COMMAND,) = re.findall(r"    torchrun (--standalone .*) train.py\n", PAGE)

KILLED = """
import os, signal
from torch.optim.optimizer import register_optimizer_step_pre_hook

steps_left = {("0", "1"): 25, ("1", "0"): 15}.get((os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]), -1)

def kill(*_):
    global steps_left
    steps_left -= 1
    if steps_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_pre_hook(kill)
"""
"""Rank 1 ends in its 25th step, and of the ranks that start then, rank 0 in its 15th."""


def uninterrupted(folder):
    """What rank 0 prints if nothing ends."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(SCRIPT, {})
    return printed.getvalue()


def losses_by_step(text):
    return [(int(step), float(loss)) for step, loss in (line.split() for line in text.splitlines())]


@pytest.mark.procs
def test_training_goes_on_from_the_newest_checkpoint_each_time_a_rank_was_killed(tmp_path):
    folders = {name: tmp_path / name for name in ("uninterrupted", "killed")}
    for folder in folders.values():
        folder.mkdir()
    right = dict(losses_by_step(run_processes(uninterrupted, 2, str(folders["uninterrupted"]))[0]))
    assert list(right) == list(range(1, 61))

    (folders["killed"] / "train.py").write_text(KILLED + SCRIPT)
    done = subprocess.run(
        [executable(), "-m", "torch.distributed.run", *COMMAND.split(), "train.py"],
        capture_output=True, text=True, cwd=folders["killed"], timeout=PROGRAM_TIMEOUT_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = losses_by_step(done.stdout)
    steps = [step for step, _ in found]
    begun = [step for before, step in zip([0, *steps], steps, strict=False) if step != before + 1]
    assert begun == [21, 31] and steps[-1] == 60
    assert all(loss == right[step] for step, loss in found)
