"""``python -m workbench.flow.launch``: the pipeline of the document on two real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.flow.running import source_of
from tests.flow.test_graph import plain_losses
from tests.timeouts import PROGRAM_TIMEOUT_S
from workbench.flow import world_join
from workbench.flow.launch import arguments_for_torchrun

ROOT = Path(__file__).parents[2]
IMPORT = "from workbench import flow\n"


@pytest.mark.procs
@pytest.mark.slow
def test_the_pipeline_of_the_document_runs_on_two_processes(tmp_path):
    program = tmp_path / "pipeline.py"
    said = 'print("last", loss.item(), flow.env.get_rank(), flow.env.get_world_size())'
    program.write_text(source_of("graph_pipeline").replace(IMPORT, f"{IMPORT}flow.manual_seed(7)\n", 1) + said)
    command = [
        sys.executable,
        "-m",
        "workbench.flow.launch",
        "--nproc_per_node",
        "2",
        "--logdir",
        str(tmp_path / "logs"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(program)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    errors = "".join(file.read_text() for file in (tmp_path / "logs").rglob("stderr.log"))
    assert done.returncode == 0, done.stderr + errors
    assert 'Write placement("cuda", ranks=[0])' in errors
    lines = [file.read_text().splitlines()[-1].split() for file in (tmp_path / "logs").rglob("stdout.log")]
    assert sorted((int(rank), int(size)) for _, _, rank, size in lines) == [(0, 2), (1, 2)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        layers = [nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, 10)]
        x, y = torch.randn(16, 1, 28, 28), torch.randint(0, 10, (16,))
    expected = plain_losses([weight for layer in layers for weight in layer.parameters()], x, y, 20)[-1]
    assert [float(loss) for _, loss, _, _ in lines] == pytest.approx([expected] * 2, rel=1e-6)


def test_options_of_several_machines_are_handed_over():
    told = arguments_for_torchrun(
        [
            "--nnodes=2", "--node_rank=1", "--nproc_per_node=4", "--master_addr=10.0.0.1", "--master_port=29600",
            "prog.py", "-x",
        ]
    )  # fmt: skip
    assert told == [
        "--nproc-per-node=4", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29600",
        "prog.py", "-x",
    ]  # fmt: skip


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_program_joins_the_world_of_any_launcher(variable, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(variable, "2")
    monkeypatch.setattr(world_join, "joined", lambda: None)
    monkeypatch.setattr(world_join, "init", lambda: "joined")
    assert world_join.join() == "joined"
