"""Mistakes with job functions: each error names the argument, both values and the fix."""

from __future__ import annotations

import threading
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench.flow.typing as tp
from workbench import flow
from workbench.errors import CheckpointError, JobError, PlacementError, SbpError
from workbench.testing import run_ranks

IMAGES = tp.Numpy.Placeholder((4, 3))
X = np.ones((4, 3), np.float32)


@pytest.fixture(autouse=True)
def _any_number_of_devices() -> Iterator[None]:
    yield
    flow.config.reset()


@flow.global_function()
def scale(x: IMAGES) -> tp.Numpy:
    return x * 2


@flow.global_function()
def scale_each(x: tp.ListNumpy.Placeholder((2, 3))) -> tp.ListNumpy:
    return x * 2


def job_of(body: Callable[[Any], Any], **settings: Any) -> Any:
    def job(x: IMAGES) -> tp.Numpy:
        return body(x)

    return flow.global_function(**settings)(job)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: scale(X[:3]), ValueError, "the argument 'x' has shape (3, 3), but its placeholder has (4, 3)"),
        (lambda: scale(X.astype("float64")), TypeError, "'x' has dtype float64, but its placeholder has float32"),
        (lambda: scale([X, X]), TypeError, "'x' is a list of 2, not an array. A Numpy argument (consistent view)"),
        (lambda: scale(3.0), TypeError, "'x' is a float, but its placeholder takes an array of shape (4, 3)"),
        (lambda: scale(X, X), TypeError, "scale: too many positional arguments. It takes x"),
        (lambda: scale_each(X), TypeError, "'x' is an array of shape (4, 3), not a list. A ListNumpy argument"),
        (lambda: scale_each([X, X]), ValueError, "'x'[0] has shape (4, 3), but its placeholder has (2, 3)"),
        (lambda: scale_each([X[:2]] * 3), ValueError, "'x' is a list of 3, but the job runs on 2 devices"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], kind: type, words: str) -> None:
    with pytest.raises(kind) as caught:
        run_ranks(lambda rank: call(), 2)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("body", "settings", "kind", "words"),
    [
        (
            lambda x: flow.get_variable("w", (4, 3), distribute=flow.distribute.split(axis=2)),
            {},
            SbpError,
            "split(axis=2) of a variable of shape (4, 3), which has 2 dims. The axis is one of 0, 1",
        ),
        (
            lambda x: x * 2,
            {"type": "train"},
            JobError,
            'job: a job of type "train" that named 0 losses; at least 1 is needed. Call flow.losses.add_loss(loss)',
        ),
        (lambda x: flow.losses.add_loss(x), {}, JobError, 'a job of type "predict": it updates nothing'),
        (
            lambda x: flow.optimizer.SGD(0.1).minimize(x),
            {"type": "train"},
            JobError,
            "none of the 0 variables of the job",
        ),
        (
            lambda x: [flow.optimizer.SGD(0.1).minimize(x) for _ in range(2)],
            {"type": "train"},
            JobError,
            "job: 2 calls of optimizer.minimize, and a job has one update rule",
        ),
        (lambda x: "text", {}, JobError, "job returns a str. A job returns tensors"),
        (lambda x: flow.unpack(x, 2), {}, JobError, "Join them first: flow.pack(x, 2)"),
        (lambda x: flow.unpack(x, 3), {}, JobError, "4 rows in 3 micro-batches"),
        (lambda x: flow.pack(flow.unpack(x, 2), 4), {}, JobError, "pack(x, 4): x is 2 micro-batches"),
        (lambda x: flow.get_variable("w"), {}, JobError, "get_variable('w'): it has no shape"),
        (lambda x: flow.get_variable("w", (2,), initializer=0.1), {}, TypeError, "initializer=0.1): an initializer is"),
        (
            lambda x: [flow.get_variable("w", shape) for shape in ((2, 3), (3, 2))],
            {},
            JobError,
            "get_variable('w'): shape (3, 2) and torch.float32 are asked for, but the variable has (2, 3)",
        ),
        (lambda x: flow.nn.dropout(x, rate=1.0), {"type": "train"}, ValueError, "dropout(rate=1.0)"),
        (lambda x: flow.nn.max_pool2d(x, 2, 2, "EQUAL"), {}, ValueError, "padding='EQUAL': known are 'SAME'"),
    ],
)
def test_wrong_bodies(body: Callable[[Any], Any], settings: Any, kind: type, words: str) -> None:
    with pytest.raises(kind) as caught:
        run_ranks(lambda rank: job_of(body, **settings)(X), 2)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("0", "device '0' does not parse. Devices are written host:device or host:first-last"),
        ("0:1-0", "goes from 1 to 0"),
        ("0:2", "scope.placement('gpu', '0:2') in job: there is no device 0:2. There are 2 cpu devices: \"0:0-1\""),
        ("1:0", "there is no device 1:0. There are 2 cpu devices"),
        (["0:0", "0:0-1"], "3 devices, 2 different ones"),
        ([], "0 devices, at least 1 is needed"),
    ],
)
def test_wrong_scopes(devices: Any, words: str) -> None:
    def body(x: Any) -> Any:
        with flow.scope.placement("gpu", devices):
            return x * 2

    with pytest.raises(PlacementError) as caught:
        run_ranks(lambda rank: job_of(body)(X), 2)
    assert words in str(caught.value)


def test_a_scope_with_more_places_than_devices() -> None:
    def body(x: Any) -> Any:
        with flow.scope.placement("gpu", "0:0-2", (2, 2)):
            return x * 2

    with pytest.raises(PlacementError, match=r"hierarchy \(2, 2\) has 4 places for 3 ranks"):
        run_ranks(lambda rank: job_of(body)(X), 3)


def test_unknown_device_type() -> None:
    with pytest.raises(PlacementError, match=r"device type 'tpu': known are gpu, cuda and cpu"):
        flow.scope.placement("tpu", "0:0")


def test_more_devices_than_there_are() -> None:
    flow.config.gpu_device_num(3)
    with pytest.raises(PlacementError, match=r"3 devices of each host are asked for\. There are 2 cpu devices"):
        run_ranks(lambda rank: scale(X), 2)
    with pytest.raises(JobError, match="gpu_device_num\\(0\\): a number of 1 or more"):
        flow.config.gpu_device_num(0)


@pytest.mark.parametrize("call", [lambda: flow.get_variable("w", (2,)), lambda: flow.layers.dense(X, 3)])
def test_what_belongs_in_a_job(call: Callable[[], Any]) -> None:
    with pytest.raises(JobError, match="is called outside of a job function"):
        call()


def mirrored() -> Any:
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())
    return config


def test_wrong_declarations() -> None:
    def untyped(x) -> tp.Numpy: ...  # type: ignore[no-untyped-def]

    def both(x: IMAGES, y: tp.ListNumpy.Placeholder((2,))) -> tp.Numpy: ...

    def lists(x: IMAGES) -> tuple[tp.Numpy, typing.Any]: ...

    for function, config, words in [
        (untyped, None, "untyped: the argument 'x' has no annotation"),
        (both, None, "both, a job in the mirrored view: the argument 'x', the result are Numpy"),
        (lists, mirrored(), "lists, a job in the mirrored view: the argument 'x', the result are Numpy"),
    ]:
        with pytest.raises(JobError) as caught:
            flow.global_function(function_config=config)(function)
        assert words in str(caught.value)
    with pytest.raises(JobError, match='types are "train" and "predict"'):
        flow.global_function(type="fit")
    with pytest.raises(JobError, match="used without brackets"):
        flow.global_function(untyped)
    half = flow.function_config()
    half.default_data_type(flow.bfloat16)
    with pytest.raises(TypeError, match=r"dtype=torch\.bfloat16 is none that numpy has"):
        flow.global_function(function_config=half)(scale_each.__wrapped__)
    with pytest.raises(TypeError, match="a shape is a tuple of whole numbers"):
        tp.Numpy.Placeholder(4)


def test_mirrored_view_has_whole_variables_and_no_scopes() -> None:
    def body(x: Any) -> Any:
        return flow.get_variable("w", (2, 3), distribute=flow.distribute.split(0))

    def scoped(x: Any) -> Any:
        with flow.scope.placement("gpu", "0:0"):
            return x

    for made, kind in [(body, SbpError), (scoped, PlacementError)]:
        job = flow.global_function()(with_body(made))
        with pytest.raises(kind, match="in job, a job in the mirrored view"):
            run_ranks(lambda rank, job=job: job([X[:2], X[2:]]), 2)


def test_mirrored_jobs_take_no_variable_that_a_device_has_in_part_or_not() -> None:
    mirrored = flow.global_function()(with_body(lambda x: flow.get_variable("w", (4, 3))))

    def in_part() -> None:
        job_of(lambda x: flow.get_variable("w", (4, 3), distribute=flow.distribute.split(0)))(X)
        mirrored([X[:2], X[2:]])

    def on_more_devices() -> None:
        flow.config.gpu_device_num(2)
        mirrored([X[:2], X[2:]])
        flow.config.gpu_device_num(3)
        mirrored([X[:2]] * 3)

    for program, num_ranks, words in [(in_part, 2, r"S\(0\) on"), (on_more_devices, 3, r"\[0, 1, 2\].*\[0, 1\]")]:
        with pytest.raises(JobError, match=rf"get_variable\('w'\) in job, a job in the mirrored view .*{words}"):
            run_ranks(program, num_ranks)


def with_body(body: Callable[[Any], Any]) -> Any:
    def job(x: tp.ListNumpy.Placeholder((2, 3))) -> tp.ListNumpy:
        return body(x)

    return job


def test_clipping_in_the_mirrored_view_takes_all_devices() -> None:
    def body(x: Any) -> Any:
        rule = flow.optimizer.SGD(0.1, grad_clipping=flow.optimizer.grad_clipping.by_global_norm(1.0))
        rule.minimize(flow.layers.dense(x, 2, name="a"))

    flow.config.gpu_device_num(2)
    job = flow.global_function(type="train")(with_body(body))
    with pytest.raises(JobError, match="job in the mirrored view on 2 of 3 devices"):
        run_ranks(lambda rank: job([X[:2], X[2:]]), 3)


def test_a_body_that_cannot_be_sent() -> None:
    from workbench.flow.jobs import driver

    lock = threading.Lock()
    with pytest.raises(
        JobError, match=r"job: the function cannot be sent to the engines, .*cannot pickle '_thread\.lock'"
    ):
        driver._pickled(job_of(lambda x: lock).job)


def test_a_cell_of_a_notebook_is_named_as_there() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    from workbench.flow.jobs import driver

    shell = InteractiveShell.instance()
    try:
        shell.user_ns["flow"] = flow
        shell.run_cell("def helper():\n    return 1", store_history=True)
        shell.run_cell("@flow.global_function()\ndef job():\n    return helper()", store_history=True)
        sources = list(driver._sources(shell.user_ns["job"].job.body))
    finally:
        InteractiveShell.clear_instance()
    assert sorted(title for _, (title, _) in sources) == ["cell In[1]", "cell In[2]"]
    assert any("    return helper()\n" in lines for _, (_, lines) in sources)


@pytest.mark.filterwarnings("ignore:.*older spelling:DeprecationWarning")
def test_config_mistakes() -> None:
    config = flow.function_config()
    with pytest.raises(JobError, match=r'it holds .sgd_conf., and one of "naive_conf", "momentum_conf", "adam_conf"'):
        config.train.model_update_conf({"sgd_conf": {}})
    with pytest.raises(AttributeError, match="function_config has no setting 'default_view'"):
        config.default_view(1)
    with pytest.raises(TypeError, match=r"views are flow\.scope\.consistent_view"):
        config.default_logical_view("mirrored")

    def body(x: Any) -> Any:
        flow.losses.add_loss(x * flow.get_variable("w", (3,)))

    with pytest.raises(JobError, match=r"the job's config has no learning rate\. Set it, config\.train\.primary_lr"):
        run_ranks(lambda rank: job_of(body, type="train")(X), 2)


def dense_job(units: int, name: str = "a") -> Any:
    return job_of(lambda x: flow.layers.dense(x, units, kernel_initializer=flow.truncated_normal(), name=name))


def test_checkpoint_of_another_model(tmp_path: Path) -> None:
    check_point, folder = flow.train.CheckPoint(), tmp_path / "saved"

    def save_nothing() -> None:  # on all ranks
        with pytest.raises(CheckpointError, match="there are 0 variables, for no job has run yet"):
            check_point.save(folder)

    run_ranks(save_nothing, 2)

    def save() -> None:
        dense_job(8)(X)
        check_point.save(folder)

    def load_before(units: int, name: str) -> None:
        check_point.load(folder)
        dense_job(units, name)(X)

    def load_after(units: int, name: str) -> None:
        dense_job(units, name)(X)
        check_point.load(folder)

    run_ranks(save, 1)
    for load, words in [
        (lambda: load_before(8, "b"), "get_variable('b-weight'): the checkpoint"),
        (lambda: load_before(6, "a"), "get_variable('a-weight'): shape (6, 3) is asked for, but the checkpoint"),
        (lambda: load_after(8, "b"), "of another model: b-weight is not in the checkpoint; b-bias is not in the"),
        (lambda: load_after(6, "a"), "a-weight has shape (8, 3) in the checkpoint, (6, 3) here"),
        (lambda: check_point.load(tmp_path / "none"), "there is no such directory"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            run_ranks(lambda rank, load=load: load(), 2)
        assert words in str(caught.value)

    def more_than_was_saved() -> Any:
        check_point.load(folder, strict=False)
        return dense_job(8)(X), dense_job(6, "b")(X)

    loaded, new = run_ranks(lambda rank: more_than_was_saved(), 2)[0]
    assert loaded.any() and new.any()
