"""The script of docs/guides/restarts.md on two hosts, of which one is lost and comes back."""

import re
import subprocess

import psutil
import pytest

from tests.cluster.programs import environment_of_scripts
from tests.processes import run_processes
from tests.session import hosts
from tests.timeouts import PROGRAM_TIMEOUT_S, wait_until
from tests.training.saving.test_restarts import PAGE, SCRIPT, losses_by_step, uninterrupted

((VARIABLE, COMMAND),) = re.findall(r"    (\w+)=1 (torchrun --nnodes .*) train.py\n", PAGE)
FASTER = ["--monitor-interval=0.1", "--rdzv-conf=keep_alive_interval=1,last_call_timeout=2"]
WHY_NOT = hosts.missing()

PACE = """
import pathlib, time
import workbench as wb
from torch.optim.optimizer import register_optimizer_step_pre_hook

num_steps = 0

def pace(*_):
    global num_steps
    num_steps += 1
    worlds = pathlib.Path("worlds")
    if num_steps == 1 and wb.rank() == 0:
        with worlds.open("a") as file:
            file.write(f"{wb.world_size()}\\n")
    if num_steps == 15 and wb.rank() == wb.world_size() - 1 and len(worlds.read_text().split()) < 3:
        pathlib.Path(f"waits-{wb.world_size()}").touch()
        time.sleep(600)

register_optimizer_step_pre_hook(pace)
"""
"""The last rank of the first two worlds does not end its 15th step."""


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "can be made")
def test_the_other_host_goes_on_alone_and_then_with_the_one_that_came_back(network, tmp_path):
    right = dict(losses_by_step(run_processes(uninterrupted, 2, str(tmp_path))[0]))
    folder = tmp_path / "hosts"
    folder.mkdir()
    (folder / "train.py").write_text(PACE + SCRIPT)
    command = [*COMMAND.replace("--nproc-per-node 8", "--nproc-per-node 1").split(), *FASTER, "train.py"]
    agents = []

    def start(host):
        with (
            (folder / f"output-{len(agents)}").open("wb") as output,
            (folder / f"errors-{len(agents)}").open("wb") as errors,
        ):
            options = {
                "stdout": output,
                "stderr": errors,
                "cwd": folder,
                "env": {**environment_of_scripts(), VARIABLE: "1"},
            }
            agents.append(host.spawn(*command, **options))

    def errors():
        return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("errors-*")))

    here, other = network.hosts
    try:
        start(here)
        start(other)
        wait_until((folder / "waits-2").exists, errors)
        _kill_tree(agents[1])
        wait_until((folder / "waits-1").exists, errors)
        start(other)
        assert agents[0].wait(PROGRAM_TIMEOUT_S) == 0, errors()
    finally:
        for agent in agents:
            _kill_tree(agent)
    assert (folder / "worlds").read_text().split() == ["2", "1", "2"]
    found = losses_by_step((folder / "output-0").read_text())
    steps = [step for step, _ in found]
    assert [step for before, step in zip([0, *steps], steps, strict=False) if step != before + 1] == [11, 21]
    assert steps[-1] == 60
    assert all(loss == pytest.approx(right[step], rel=1e-4) for step, loss in found)


def _kill_tree(agent: subprocess.Popen) -> None:
    if agent.poll() is None:
        for process in [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]:
            process.kill()
        agent.wait()
