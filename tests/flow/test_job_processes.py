"""Job functions in a program that every rank runs, on real processes of two hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import workbench.flow.typing as tp
from tests.processes import run_processes
from workbench import flow
from workbench.testing import run_ranks

X = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)


@flow.global_function(type="train")
def job(x: tp.Numpy.Placeholder((6, 5))) -> tuple[tp.Numpy, tp.Numpy]:
    normal = flow.truncated_normal(0.5)
    hidden = flow.layers.dense(x, 7, flow.math.tanh, kernel_initializer=normal, name="hidden")
    with flow.scope.placement("gpu", "1:0"):
        hidden = flow.layers.dense(flow.nn.dropout(hidden), 4, kernel_initializer=normal, name="on the other host")
    output = flow.layers.dense(
        hidden, 3, kernel_initializer=normal, model_distribute=flow.distribute.split(axis=0), name="output"
    )
    loss = flow.math.square(output)
    flow.optimizer.Adam(0.01).minimize(loss)
    return loss, output


def two_steps() -> Any:
    return [job(X), job(X)], flow.get_all_variables()["on the other host-weight"].placement.ranks


@pytest.mark.procs
def test_a_program_of_all_ranks_has_the_numbers_of_simulated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["left", "left", "right"]
    results = run_processes(two_steps, 3, environment=[{"WORKBENCH_HOST": name} for name in names])
    with monkeypatch.context() as patch:
        patch.setattr(flow.scope.placement, "__enter__", lambda self: None)
        patch.setattr(flow.scope.placement, "__exit__", lambda self, *exc: None)
        expected, _ = run_ranks(lambda rank: two_steps(), 1)[0]
    for steps, ranks in results:
        assert ranks == [2]
        for ours, theirs in zip(steps, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
