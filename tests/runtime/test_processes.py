"""The programs of the simulated ranks on real processes over shared memory and over gloo, started by torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.procs


def torchrun(num_ranks, *call, transport="auto", timeout_s=110):
    """Run ``tests.runtime.run_program`` on so many processes; returns their output."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", "--standalone"]
    command += ["-m", "tests.runtime.run_program", *map(str, call)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORKBENCH_TRANSPORT": transport}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_boxing_between_sampled_layouts(transport):
    assert torchrun(4, "boxing", 4, 60, transport=transport).count(f"60 boxings over {transport}") == 4


@pytest.mark.parametrize("transport", ["shared", pytest.param("gloo", marks=pytest.mark.slow)])
def test_training_equals_one_device_under_every_preset(transport):
    output = torchrun(2, "training", "mlp", "data", "model", "pipeline", "hybrid", transport=transport)
    assert output.count(f"equal over {transport}") == 4


def test_a_convolutional_net_on_four_processes():
    output = torchrun(4, "training", "cnn", "*: data | 1x2x2", "conv1: data; fc1: model@1 | 2x1x2 mb=3 1f1b")
    assert output.count("equal over shared") == 2


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_rank_that_dies_ends_the_others_waits_with_the_cause(transport):
    assert "lost" in torchrun(2, "dying", transport=transport)


def test_a_trace_counts_what_the_transport_sends():
    counts = re.findall(r"(\d+) bytes traced", torchrun(2, "traced"))  # two processes may share a line
    assert len(counts) == 2 and len(set(counts)) == 1


def test_the_example_of_the_readme():
    assert torchrun(2, "example").count("torch.Size([4, 8])") == 2
