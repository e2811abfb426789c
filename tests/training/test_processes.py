"""Hybrids on four real processes, and what loading a model costs a process."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from tests.processes import run_processes
from tests.training.training_runs import Setup, assert_runs_agree, on_one_device, on_this_rank, strategy_text

pytestmark = pytest.mark.procs

WIDTH, NUM_LAYERS = 1536, 6


def run_of(setup, text):
    return on_this_rank(setup, setup.model(), text)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mlp", "2x1x2 mb=3 1f1b"),
        pytest.param("cnn", "1x2x2 mb=3", marks=pytest.mark.slow),
        pytest.param("gpt2", "2x1x2 mb=3 1f1b", marks=pytest.mark.slow),
        pytest.param("llama", "1x2x2 mb=3", marks=pytest.mark.slow),
    ],
)
def test_hybrids_train_like_one_device(kind, options):
    setup = Setup(kind, num_steps=4)
    truth = on_one_device(setup, 3)
    for found in run_processes(run_of, 4, setup, strategy_text(kind, "model", options)):
        assert_runs_agree(found, truth, setup)


def wide():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def status(key):
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def loading(path, strategy):
    """Bytes of this rank's shards, and how much more memory the process had at the most while it loaded them."""
    wb.checkpoint.load_safetensors(
        wb.parallelize(nn.Sequential(nn.Linear(4, 4)), "*: data"), path.parent / "small.safetensors"
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    model = wb.parallelize(wide(), strategy, init=path)
    return sum(p.to_local().nbytes for p in model.parameters()), status("VmHWM") - before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["*: model", "*: data | 1x2x1 zero=3"])
def test_the_peak_of_loading_is_within_a_fifth_of_the_shards(tmp_path, strategy):
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    save_file(nn.Sequential(*layers).state_dict(), tmp_path / "wide.safetensors")
    save_file(nn.Sequential(nn.Linear(4, 4)).state_dict(), tmp_path / "small.safetensors")
    whole = sum(parameter.nbytes for layer in layers for parameter in layer.parameters())
    for shards, peak in run_processes(loading, 2, tmp_path / "wide.safetensors", strategy):
        assert 0.5 * whole <= shards <= 0.51 * whole
        assert shards <= peak <= 1.2 * shards, f"{peak / shards:.2f} times the shards"
