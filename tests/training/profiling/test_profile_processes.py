"""Profiles of processes over torch.distributed, whose clocks are aligned as those of several hosts are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.processes import run_processes
from tests.training.profiling.trace_files import assert_is_valid, named

pytestmark = pytest.mark.procs


def two_profiles(folder: str) -> list[float]:
    """Several in one process, since torch's profiler once wrote to the memory of an earlier one. This rank's bytes."""
    torch.manual_seed(0)
    model = wb.parallelize(nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)]), "*: data | zero=3")
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.ones(8, 16)
    found = []
    for number in range(2):
        with wb.debug.profile(Path(folder) / f"{number}.json", steps=2, warmup=2) as profile:
            for _ in range(5):
                optimizer.zero_grad()
                wb.forward_backward(model, F.mse_loss, inputs, inputs)
                optimizer.step()
        found.append(profile.ranks[wb.rank()].sent_bytes)
    return found


def test_ranks_over_gloo(tmp_path):
    found = run_processes(two_profiles, 2, str(tmp_path), environment={"WORKBENCH_TRANSPORT": "gloo"})
    assert found[0] == found[1] and len(set(found[0])) == 1, "each has the same exchanges"
    for number in range(2):
        events = json.loads((tmp_path / f"{number}.json").read_text())["traceEvents"]
        assert_is_valid(events)
        for one, other in zip(named(events, "step", 0), named(events, "step", 1), strict=True):
            assert one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]
        assert named(events, "exchange", 1) and named(events, "cpu_op", 1)
