"""Compared runs on a device: the run on one device uses the same device, as the strategies do."""

import math
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.checked_device import DEVICE, counted
from tests.checked_device.test_training import X, Y, mlp
from tests.session.simulated_session import SimulatedSession
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject
from workbench.session.on_engine import shell
from workbench.testing import run_ranks
from workbench.training.runs import exact_dtypes
from workbench.training.runs.job import Job
from workbench.training.runs.train import largest_difference, run_one_device, run_strategy, warm_up


def with_dropout():
    return nn.Sequential(mlp(), nn.Dropout(0.3), nn.Linear(6, 6))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=2", "pipeline | mb=2", "*: data | bf16"])
@pytest.mark.parametrize("make", [mlp, with_dropout])
def test_a_run_equals_the_run_on_one_device(make, strategy):
    job = Job(make, (X, Y), F.cross_entropy, None, 8, 3)
    micro_batches, precision = 2 if "mb=2" in strategy else 1, "bf16" if "bf16" in strategy else "fp32"

    def program():
        warm_up(job)
        with counted() as counts:
            truth = run_one_device(job, micro_batches, precision=precision)
        assert counts.launches.total() > 50, "the truth ran on the host"
        return truth, run_strategy(job, strategy, keeps_weights=True)

    for truth, run in run_ranks(program, device=DEVICE):
        tolerance = 2e-2 if precision == "bf16" else 1e-5
        assert run.losses == pytest.approx(truth.losses, rel=tolerance) and not math.isnan(run.losses[-1])
        assert largest_difference(run.weights, truth.weights or truth.course.end) < tolerance
        assert truth.draws == (make is with_dropout)


@pytest.fixture
def device_session(monkeypatch):
    monkeypatch.setattr(shell, "publish", lambda message: None)
    monkeypatch.setattr(shell, "commands", list)
    return SimulatedSession(device=DEVICE)


def test_compare_trains_on_the_device_and_finds_the_runs_equal(device_session):
    subject = Subject.of(mlp, (X, Y), F.cross_entropy, batch_size=8, steps=4)
    with Comparison(device_session, subject) as comparison:
        runs = [comparison.start(strategy).result() for strategy in ("*: data", "*: model", "*: data | bf16")]
    assert [run.equal for run in runs] == [True, True, True]


@pytest.fixture
def with_tf32(monkeypatch):
    monkeypatch.setattr(exact_dtypes, "_has_gpu", lambda: True)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_a_compared_run_computes_without_tf32(device_session, with_tf32):
    matmul, seen = torch.backends.cuda.matmul, SimpleQueue()  # a run puts back what a set would have

    def loss_fn(output, targets):
        settings = matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
        seen.put((*settings, matmul.allow_bf16_reduced_precision_reduction))
        return F.cross_entropy(output, targets)

    subject = Subject.of(mlp, (X, Y), loss_fn, batch_size=8, steps=2)
    with Comparison(device_session, subject) as comparison:
        assert comparison.start("*: data").result().equal
    found = {seen.get() for _ in range(seen.qsize())}
    assert found == {("ieee", "ieee", False), ("tf32", "tf32", True)}  # the first small step checks no numbers
    assert matmul.fp32_precision == "tf32"
