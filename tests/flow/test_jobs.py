"""What job functions mean: layouts, scopes, views, variables, random numbers and results."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import workbench.flow.typing as tp
from tests.flow.small_job import COLUMNS, NORMAL, ROWS, Images, Labels, X, Y, torch_losses, train_with
from workbench import flow
from workbench.errors import JobError
from workbench.flow import hosts
from workbench.flow.jobs import store
from workbench.tensors.world import current
from workbench.testing import run_ranks


class Named(typing.NamedTuple):
    x: Any


@pytest.fixture(autouse=True)
def _any_number_of_devices() -> Iterator[None]:
    yield
    flow.config.reset()


def mirrored_config() -> Any:
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())
    return config


def layouts_of(job: Any, *arrays: Any) -> list[Any]:
    """(sbp, ranks) of what the body puts into ``seen``, on two ranks."""
    seen: dict[int, Any] = {}

    def run(rank: int) -> None:
        job(lambda name, x: seen.setdefault(rank, []).append((name, str(x.sbp), x.placement.ranks)))(*arrays)

    run_ranks(run, 2)
    assert seen[0] == seen[1]
    return seen[0]


def test_placeholders_are_split_by_rows_and_split_layers_compute_columns() -> None:
    def declare(see: Any) -> Any:
        @flow.global_function()
        def job(x: Images) -> tp.Numpy:
            see("x", x)
            hidden = flow.layers.dense(x, 8, kernel_initializer=NORMAL, name="hidden")
            see("hidden", hidden)
            split = flow.distribute.split(axis=0)
            output = flow.layers.dense(hidden, 4, kernel_initializer=NORMAL, model_distribute=split, name="output")
            see("weight", flow.get_all_variables()["output-weight"])
            see("output", output)
            return output

        return job

    assert layouts_of(declare, X) == [
        ("x", "(S(0),)", [0, 1]),
        ("hidden", "(S(0),)", [0, 1]),
        ("weight", "(S(0),)", [0, 1]),
        ("output", "(S(1),)", [0, 1]),
    ]


def test_a_scope_says_where_functions_and_variables_are() -> None:
    def declare(see: Any) -> Any:
        @flow.global_function()
        def job(x: Images) -> tp.Numpy:
            with flow.scope.placement("gpu", "0:1"):
                hidden = flow.layers.dense(x, 4, kernel_initializer=NORMAL, name="hidden")
                see("hidden", hidden)
                see("weight", flow.get_all_variables()["hidden-weight"])
                with flow.scope.placement("cpu", "0:0-1"):
                    see("inner", flow.nn.relu(hidden))
                see("again", flow.nn.relu(hidden))
            see("after", flow.nn.relu(hidden))
            return hidden

        return job

    assert layouts_of(declare, X) == [
        ("hidden", "(B,)", [1]),
        ("weight", "(B,)", [1]),
        ("inner", "(S(0),)", [0, 1]),
        ("again", "(B,)", [1]),
        ("after", "(S(0),)", [0, 1]),
    ]


def test_the_host_part_of_a_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "host_name", lambda: "left" if current().rank in (0, 2) else "right")

    @flow.global_function()
    def job(x: Images) -> tp.Numpy:
        with flow.scope.placement("gpu", ["1:1", "0:1"]) as here:
            assert here.ranks == [3, 2]
            return flow.identity(x)

    for result in run_ranks(lambda rank: job(X), 4):
        np.testing.assert_array_equal(result, X)


def test_initial_values_are_the_same_for_every_layout_and_number_of_devices() -> None:
    made = {
        "truncated": flow.truncated_normal(0.1),
        "normal": flow.random_normal_initializer(1.0, 2.0),
        "uniform": flow.random_uniform_initializer(-1.0, 1.0),
        "glorot": flow.glorot_uniform_initializer(),
        "kaiming": flow.kaiming_initializer(distribution="truncated_normal", nonlinearity="relu"),
        "constant": flow.constant_initializer(3.0),
    }

    def values(distribute: Any) -> Any:
        @flow.global_function()
        def job() -> tp.Numpy:
            return {
                name: flow.get_variable(name, (60, 50), initializer=initializer, distribute=distribute)
                for name, initializer in made.items()
            }

        return job()

    one_device = run_ranks(lambda rank: values(None), 1)[0]
    for split in (None, flow.distribute.split(0), flow.distribute.split(-1)):
        for name, value in run_ranks(lambda rank, split=split: values(split), 3)[2].items():
            np.testing.assert_array_equal(value, one_device[name])
    assert abs(one_device["truncated"]).max() <= 0.2
    assert one_device["truncated"].std() == pytest.approx(0.1 * 0.88, rel=0.05)
    assert one_device["normal"].mean() == pytest.approx(1.0, abs=0.15)
    assert abs(one_device["glorot"]).max() == pytest.approx((6 / 110) ** 0.5, rel=0.01)
    assert one_device["kaiming"].std() == pytest.approx((2 / 50) ** 0.5, rel=0.05)
    assert (one_device["constant"] == 3.0).all()


def test_the_mirrored_view_gives_every_device_its_arrays_and_averages_gradients() -> None:
    half = ROWS // 2

    @flow.global_function(type="train", function_config=mirrored_config())
    def mirrored(
        x: tp.ListNumpy.Placeholder((half, COLUMNS)), labels: tp.ListNumpy.Placeholder((half,), dtype=flow.int32)
    ) -> tuple[tp.ListNumpy, tp.ListNumpy]:
        assert x.shape == (half, COLUMNS)
        hidden = flow.layers.dense(x, 7, flow.math.tanh, kernel_initializer=NORMAL, name="a")
        logits = flow.layers.dense(hidden, 3, kernel_initializer=NORMAL, name="b")
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        flow.optimizer.SGD(0.3, momentum=0.9).minimize(loss)
        return loss, x

    def run(rank: int) -> Any:
        steps = [mirrored([X[:half], X[half:]], [Y[:half], Y[half:]]) for _ in range(4)]
        return steps, train_with(flow.optimizer.SGD(0.3))(X, Y)  # variables are shared with jobs of the other view

    expected = torch_losses(lambda p: torch.optim.SGD(p, 0.3, momentum=0.9), [0.3] * 5)
    for num_ranks in (2, 3):
        flow.config.gpu_device_num(2)
        for steps, afterwards in run_ranks(run, num_ranks):
            for (loss, xs), theirs in zip(steps, expected, strict=False):
                np.testing.assert_allclose(np.concatenate(loss), theirs, rtol=1e-5, atol=1e-6)
                np.testing.assert_array_equal(np.concatenate(xs), X)
            np.testing.assert_allclose(afterwards, expected[4], rtol=1e-5, atol=1e-6)


def test_dropout_is_the_same_in_both_views_and_on_any_number_of_devices() -> None:
    def body(x: Any) -> Any:
        flow.optimizer.SGD(0.1).minimize(flow.layers.dense(x, 1))
        return flow.nn.dropout(flow.nn.dropout(x + 10.0, rate=0.5), rate=0.2)

    @flow.global_function(type="train")
    def job(x: Images) -> tp.Numpy:
        return body(x)

    consistent = job

    @flow.global_function(type="train", function_config=mirrored_config())
    def job(x: tp.ListNumpy.Placeholder((2, COLUMNS))) -> tp.ListNumpy:
        return body(x)

    one_device = run_ranks(lambda rank: [consistent(X), consistent(X)], 1)[0]
    assert (one_device[0] != one_device[1]).any()
    assert 0.2 < (one_device[0] == 0).mean() < 0.9
    for results in run_ranks(lambda rank: [consistent(X), consistent(X)], 3):
        np.testing.assert_allclose(results, one_device)
    for first, _ in run_ranks(lambda rank: [job([X[:2], X[2:4], X[4:]]), job([X[:2], X[2:4], X[4:]])], 3):
        np.testing.assert_allclose(np.concatenate(first), one_device[0])


def test_micro_batches() -> None:
    @flow.global_function(type="train")
    def packed(x: Images, labels: Labels) -> tuple[tp.Numpy, tp.Numpy]:
        parts = flow.unpack(x, 3)
        assert parts.shape == (2, COLUMNS)
        hidden = flow.layers.dense(parts, 7, flow.math.tanh, kernel_initializer=NORMAL, name="a")
        logits = flow.layers.dense(hidden, 3, kernel_initializer=NORMAL, name="b")
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(flow.unpack(labels, 3), logits * 1.0)
        flow.optimizer.SGD(0.5, momentum=0).minimize(loss)
        scale = flow.repeat(flow.get_variable("scale", (1,), initializer=flow.ones_initializer(), trainable=False), 3)
        return flow.pack(loss, 3), flow.acc(flow.math.reduce_sum(parts * scale), 3)

    expected = torch_losses(lambda p: torch.optim.SGD(p, 0.5), [0.5] * 3)
    for results in run_ranks(lambda rank: [packed(X, Y) for _ in expected], 2):
        for (loss, total), theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(loss, theirs, rtol=1e-5, atol=1e-6)
            assert total == pytest.approx(X.sum(), rel=1e-4)


def test_functions_take_and_return_micro_batches_in_containers() -> None:
    @flow.global_function()
    def job(x: Images, labels: Labels) -> tuple[tp.Numpy, ...]:
        parts, ids = flow.unpack(x, 3), flow.unpack(labels, 3)
        assert isinstance(parts.shape, torch.Size)
        with pytest.raises(JobError, match="2 and 3 micro-batches"):
            torch.stack([parts, flow.unpack(x, 2)])
        left, right = torch.split(parts, [2, COLUMNS - 2], dim=1)
        best = torch.max(parts, 1)
        return (
            flow.pack(flow.concat([parts, right, left], axis=1), 3),
            flow.pack(torch.cat((parts, x[:2])), 3),
            flow.pack(torch.stack([parts, -parts], dim=1), 3),
            flow.pack(best.values + ids, 3),
            flow.pack(parts[:, 1:] > parts[:, :1], 3),
            flow.pack(np.float32(2) * abs(parts) // 1, 3),
            flow.pack((parts == parts) & ~(parts != parts[:, :1]), 3),
            flow.pack(flow.parallel_cast(parts, distribute=flow.distribute.split(axis=1)), 3),
        )

    def expected() -> list[Any]:
        joined = np.concatenate([X, X[:, 2:], X[:, :2]], 1)
        with_first = np.concatenate([np.concatenate([X[i : i + 2], X[:2]]) for i in (0, 2, 4)])
        order = [X[:, 1:] > X[:, :1], 2 * abs(X) // 1, X[:, :1] == X, X]
        return [joined, with_first, np.stack([X, -X], 1), X.max(1) + np.float32(Y), *order]

    for results in run_ranks(lambda rank: job(X, Y), 2):
        for result, theirs in zip(results, expected(), strict=True):
            np.testing.assert_array_equal(result, theirs)


def test_a_loss_may_lie_on_one_device() -> None:
    @flow.global_function(type="train")
    def job(x: Images, labels: Labels) -> tp.Numpy:
        with flow.scope.placement("gpu", "0:0"):
            hidden = flow.layers.dense(x, 7, flow.math.tanh, kernel_initializer=NORMAL, name="a")
        with flow.scope.placement("gpu", "0:1"):
            logits = flow.layers.dense(hidden, 3, kernel_initializer=NORMAL, name="b")
            loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            flow.optimizer.SGD(0.5, momentum=0, grad_clipping=0.1).minimize(loss)
        return loss

    expected = torch_losses(lambda p: torch.optim.SGD(p, 0.5), [0.5] * 3, max_norm=0.1)
    for losses in run_ranks(lambda rank: [job(X, Y) for _ in range(3)], 3):
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)


def test_results_may_be_nested_and_a_callback_may_take_them() -> None:
    @flow.global_function()
    def nested(x: Images) -> dict[str, typing.Any]:
        return {"twice": (x * 2, [x.sum()]), "number": 3, "none": None, "named": Named(x * 3)}

    @flow.global_function()
    def called(x: Images) -> tp.Callback[tp.Numpy]:
        return x * 2

    def run(rank: int) -> Any:
        heard: list[Any] = []
        called(X)(heard.append)
        return nested(X), heard[0]

    for result, heard in run_ranks(run, 2):
        np.testing.assert_array_equal(result["twice"][0], X * 2)
        assert result["twice"][1][0] == pytest.approx(X.sum(), rel=1e-4)
        assert (result["number"], result["none"]) == (3, None)
        np.testing.assert_array_equal(heard, X * 2)
        np.testing.assert_array_equal(result["named"].x, X * 3)


def test_variables_are_those_of_so_many_ranks() -> None:
    def run(rank: int) -> None:
        world = current()
        found = store.store_of(world)
        assert store.known_store(world) is store.store_of(world) is found
        world.world_size += 1  # as after a resize
        assert store.known_store(world) is None
        world.world_size -= 1

    run_ranks(run, 2)


def test_a_job_on_fewer_devices_than_there_are() -> None:
    expected = torch_losses(lambda p: torch.optim.SGD(p, 0.5), [0.5] * 3)
    flow.config.gpu_device_num(2)
    for losses in run_ranks(lambda rank: [train_with(flow.optimizer.SGD(0.5, momentum=0))(X, Y) for _ in range(3)], 3):
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
