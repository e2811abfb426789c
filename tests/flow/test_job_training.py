"""Training by job functions: update rules, learning rates, checkpoints; the losses are those of plain torch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench.flow.typing as tp
from tests.flow.small_job import COLUMNS, NORMAL, Images, Labels, X, Y, torch_losses, train_with
from workbench import flow
from workbench.testing import run_ranks


class PlainAdam(torch.optim.Optimizer):
    """Adam without bias correction, as the older documents have it."""

    def __init__(self, parameters: Any, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state.setdefault(parameter, {})
            state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * parameter.grad
            state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * parameter.grad**2
            change = state["m"] / (state["v"].sqrt() + 1e-8) + self.weight_decay * parameter
            parameter -= self.param_groups[0]["lr"] * change


@pytest.mark.parametrize(
    ("rule", "make", "rates", "max_norm"),
    [
        (flow.optimizer.SGD(0.5, momentum=0), lambda p: torch.optim.SGD(p, 0.5), [0.5] * 5, None),
        (flow.optimizer.SGD(0.3), lambda p: torch.optim.SGD(p, 0.3, momentum=0.9), [0.3] * 5, None),
        (flow.optimizer.Adam(0.01), PlainAdam, [0.01] * 5, None),
        (
            flow.optimizer.Adam(0.01, do_bias_correction=True),
            lambda p: torch.optim.Adam(p, 0.01),
            [0.01] * 5,
            None,
        ),
        (
            flow.optimizer.AdamW(0.01, weight_decay=0.1),
            lambda p: PlainAdam(p, 0.1),
            [0.01] * 5,
            None,
        ),
        (
            flow.optimizer.AdamW(0.01, do_bias_correction=True, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
            [0.01] * 5,
            None,
        ),
        (
            flow.optimizer.RMSProp(flow.optimizer.PiecewiseConstantScheduler([1], [0.01, 0.001])),
            torch.optim.RMSprop,
            [0.01, 0.01, 0.001, 0.001, 0.001],
            None,
        ),
        (
            flow.optimizer.SGD(0.5, momentum=0, grad_clipping=flow.optimizer.grad_clipping.by_global_norm(0.1)),
            lambda p: torch.optim.SGD(p, 0.5),
            [0.5] * 5,
            0.1,
        ),
    ],
    ids=["naive", "momentum", "adam", "adam corrected", "adamw", "adamw corrected", "rmsprop", "clipped"],
)
def test_update_rules_have_the_losses_of_plain_torch(rule: Any, make: Any, rates: Any, max_norm: float | None) -> None:
    expected = torch_losses(make, rates, max_norm)
    for distribute in (None, flow.distribute.split(axis=0)):
        job = train_with(rule, distribute)
        for losses in run_ranks(lambda rank, job=job: [job(X, Y) for _ in rates], 2):
            for ours, theirs in zip(losses, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not np.allclose(expected[0], expected[-1], rtol=1e-3)


def test_learning_rates_over_the_steps() -> None:
    rates = flow.optimizer
    for scheduler, step, expected in [
        (rates.PiecewiseScalingScheduler(1.0, [2, 4], [0.1, 0.01]), 5, 0.01),
        (rates.PiecewiseScalingScheduler(1.0, [2, 4], 0.1), 5, 0.1),
        (rates.CosineScheduler(1.0, 10, alpha=0.2), 5, 0.6),
        (rates.ExponentialScheduler(1.0, 2, 0.5), 3, 0.5**1.5),
        (rates.ExponentialScheduler(1.0, 2, 0.5, staircase=True), 3, 0.5),
        (rates.NaturalExpScheduler(1.0, 2, 1.0), 2, np.exp(-1.0)),
        (rates.InverseTimeScheduler(1.0, 2, 1.0), 2, 0.5),
        (rates.PolynomialSchduler(1.0, 10, 0.0, power=2.0), 5, 0.25),
        (rates.CustomScheduler(lambda step: 1.0 / (step + 1)), 3, 0.25),
        (rates.PiecewiseConstantScheduler([], [0.4], warmup=rates.warmup.linear(10, 0.5)), 5, 0.3),
        (rates.PiecewiseConstantScheduler([], [0.4], warmup=rates.warmup.constant(10, 0.5)), 5, 0.2),
        (rates.CosineScheduler(1.0, 10, warmup=rates.warmup.linear(5, 0.5)), 3, 0.8),
        (rates.CosineScheduler(1.0, 10, warmup=rates.warmup.constant(4, 0.5)), 3, 0.5),
        (rates.CosineScheduler(1.0, 10, warmup=rates.warmup.constant(4, 0.5)), 5, 0.5),
    ]:
        assert scheduler(step) == pytest.approx(expected)


def test_a_checkpoint_goes_on_with_another_number_of_devices(tmp_path: Path) -> None:
    check_point, folder = flow.train.CheckPoint(), tmp_path / "saved"
    rule = flow.optimizer.Adam(flow.optimizer.PiecewiseConstantScheduler([3], [0.1, 0.01]))

    def begin(rank: int) -> Any:
        job = train_with(rule, flow.distribute.split(0))
        losses = [job(X, Y) for _ in range(3)]
        check_point.save(folder)
        return [*losses, *(job(X, Y) for _ in range(3))]

    def resume(rank: int, distribute: Any, before: int) -> Any:
        job = train_with(rule, distribute)
        for _ in range(before):
            job(X, Y)
        check_point.load(folder)
        return [job(X, Y) for _ in range(3)]

    expected = run_ranks(begin, 2)[0]
    for num_ranks, distribute, before in [(1, None, 0), (3, None, 1), (3, flow.distribute.split(0), 0)]:
        for losses in run_ranks(lambda rank, d=distribute, b=before: resume(rank, d, b), num_ranks):
            np.testing.assert_allclose(losses, expected[3:], rtol=1e-5, atol=1e-6)


def test_init_begins_anew() -> None:
    def run(rank: int) -> Any:
        job = train_with(flow.optimizer.SGD(0.5, momentum=0.9))
        first = [job(X, Y) for _ in range(3)]
        flow.train.CheckPoint().init()
        return first, [job(X, Y) for _ in range(3)]

    for first, again in run_ranks(run, 2):
        np.testing.assert_array_equal(first, again)


def test_a_variable_is_trained_by_the_jobs_that_say_so() -> None:
    """As generator and discriminator, each in a job of its own with the other one fixed. Both jobs trained both."""

    def training(trained: str) -> Any:
        def body(x: Images) -> tp.Numpy:
            ones = flow.ones_initializer()
            a, b = (flow.get_variable(n, (COLUMNS,), initializer=ones, trainable=n == trained) for n in "ab")
            flow.optimizer.SGD(0.1).minimize(x * a * b)
            return x

        body.__name__ = f"train_{trained}"
        return flow.global_function(type="train")(body)

    @flow.global_function()
    def values() -> tuple[tp.Numpy, tp.Numpy]:
        return flow.get_variable("a", (COLUMNS,)), flow.get_variable("b", (COLUMNS,))

    def run(rank: int) -> Any:
        jobs, found = {trained: training(trained) for trained in "ab"}, []
        for trained in "abba":
            jobs[trained](X)
            found.append(values())
        return found

    for found in run_ranks(run, 2):
        (a, b), (a1, b1), (a2, b2), (a3, b3) = found
        for same, other in [(b, np.ones(COLUMNS)), (a1, a), (a2, a), (b3, b2)]:
            np.testing.assert_array_equal(same, other)
        assert all((new != old).all() for new, old in [(a, np.ones(COLUMNS)), (b1, b), (b2, b1), (a3, a2)])


def test_a_job_declared_anew_goes_on_under_its_new_rule() -> None:
    def run(rank: int) -> Any:
        train_with(flow.optimizer.SGD(0.3, momentum=0.9))(X, Y)
        job = train_with(flow.optimizer.SGD(0.3, momentum=0))
        return [job(X, Y) for _ in range(3)]

    expected = torch_losses(lambda p: torch.optim.SGD(p, 0.3), [0.3] * 4)[1:]
    for losses in run_ranks(run, 2):
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)


def test_a_job_declared_anew_after_a_load_begins_as_without_one(tmp_path: Path) -> None:
    check_point = flow.train.CheckPoint()

    def run(rank: int, loads: bool) -> Any:
        job = train_with(flow.optimizer.SGD(0.3, momentum=0.9))
        for _ in range(2):
            job(X, Y)
        if loads:
            check_point.save(tmp_path / "saved")
            check_point.load(tmp_path / "saved")
        job(X, Y)
        job = train_with(flow.optimizer.SGD(0.3, momentum=0.5))
        return [job(X, Y) for _ in range(3)]

    expected = run_ranks(lambda rank: run(rank, False), 2)
    np.testing.assert_allclose(run_ranks(lambda rank: run(rank, True), 2), expected, rtol=1e-5, atol=1e-6)


def test_a_rule_that_is_not_the_saved_one_counts(tmp_path: Path) -> None:
    check_point, folder = flow.train.CheckPoint(), tmp_path / "saved"

    def begin(rank: int) -> None:
        job = train_with(flow.optimizer.SGD(0.3, momentum=0.9))
        for _ in range(3):
            job(X, Y)
        check_point.save(folder)

    def resume(rank: int, rule: Any) -> Any:
        check_point.load(folder)
        job = train_with(rule)
        return [job(X, Y) for _ in range(3)]

    def changed(parameters: Any) -> Any:
        optimizer, steps = torch.optim.SGD(parameters, 0.3), itertools.count()
        optimizer.register_step_pre_hook(lambda *_: group.update(momentum=0.9 if next(steps) < 3 else 0.5))
        (group,) = optimizer.param_groups
        return optimizer

    run_ranks(begin, 2)
    expected = torch_losses(changed, [0.3] * 6)[3:]
    for losses in run_ranks(lambda rank: resume(rank, flow.optimizer.SGD(0.3, momentum=0.5)), 2):
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    for other in (flow.optimizer.Adam(0.01), flow.optimizer.RMSProp(0.01)):  # begin without state
        for losses in run_ranks(lambda rank, other=other: resume(rank, other), 2):
            np.testing.assert_allclose(losses[0], expected[0], rtol=1e-5, atol=1e-6)


def test_older_spellings_say_the_new_ones() -> None:
    config = flow.function_config()
    with pytest.warns(DeprecationWarning, match=r"Write function_config\.default_logical_view\(scope\.consistent_view"):
        config.default_distribute_strategy(flow.scope.consistent_view())
    with pytest.warns(
        DeprecationWarning, match=r"Write flow\.optimizer\.SGD\(.*\[0\.5\]\), momentum=0\)\.minimize\(loss\) in the job"
    ):
        config.train.primary_lr(0.5)
    config.train.model_update_conf({"momentum_conf": {"beta": 0.9}})
    with pytest.warns(DeprecationWarning, match=r'Write global_function\(type="train", function_config=config\)'):

        @flow.global_function(config)
        def job(x: Images, labels: Labels) -> tp.Numpy:
            hidden = flow.layers.dense(x, 7, flow.math.tanh, kernel_initializer=NORMAL, name="a")
            loss = flow.nn.sparse_softmax_cross_entropy_with_logits(
                labels, flow.layers.dense(hidden, 3, kernel_initializer=NORMAL, name="b")
            )
            flow.losses.add_loss(loss)
            return loss

    expected = torch_losses(lambda p: torch.optim.SGD(p, 0.5, momentum=0.9), [0.5] * 3)
    for losses in run_ranks(lambda rank: [job(X, Y) for _ in range(3)], 2):
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
