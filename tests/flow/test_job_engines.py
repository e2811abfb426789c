"""Job functions driven from one process, on real engines: one session, several jobs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import workbench.flow.typing as tp
from tests.flow.job_programs import BATCH_SIZE, losses_of, made_up_digits
from tests.flow.running import source_of
from workbench import flow
from workbench.errors import CellError
from workbench.session import Session, current
from workbench.testing import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore:.*older spelling:DeprecationWarning")]


@pytest.fixture(autouse=True)
def _fresh_configuration(no_session: None) -> Iterator[None]:
    yield
    flow.config.reset()


def program(name: str, folder: Path) -> dict[str, Any]:
    """Run a program in this process, as a script, on few made-up digits; gives the names it has set."""
    text = source_of(name, BATCH_SIZE=str(BATCH_SIZE)).replace("range(3)", "range(1)")
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    with (
        mock.patch.object(flow.data, "load_mnist", made_up_digits),
        mock.patch.object(flow.mnist_util, "load_data", made_up_digits),
    ):
        exec(compile(text, str(path), "exec"), namespace)
    return namespace


def test_programs_drive_the_engines_of_one_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[str] = []
    submit = Session.submit

    def recorded(self: Session, function: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(function.__name__)
        return submit(self, function, *args, **kwargs)

    with mock.patch.object(Session, "submit", recorded):
        hybrid = program("hybrid_mlp", tmp_path)
    session = current()
    assert session.num_engines == 2  # started by the first call
    assert sent == ["keep_job", "run_job", "run_job", "run_job"]  # a job is sent once
    expected = losses_of("hybrid_mlp", 2)
    np.testing.assert_allclose(hybrid["loss"], expected[-1], rtol=1e-5)
    assert str(expected[0].mean()) in capsys.readouterr().out

    flow.train.CheckPoint().init()
    mirrored = program("mirrored_lenet", tmp_path)  # another job of the same name takes the place of the first
    np.testing.assert_allclose(mirrored["total_loss"], np.concatenate(losses_of("mirrored_lenet", 2)[-1]), rtol=1e-5)
    assert current() is session
    _checkpoint_goes_to_one_device(tmp_path / "saved")
    _error_shows_the_users_line()
    assert "in the body" in capsys.readouterr().out
    _lost_variables_are_noticed(session)


@flow.global_function()
def predict(x: tp.Numpy.Placeholder((4, 512))) -> tp.Numpy:
    return flow.layers.dense(x, 10, name="dense2")


X = np.ones((4, 512), np.float32)


def _checkpoint_goes_to_one_device(folder: Path) -> None:
    check_point = flow.train.CheckPoint()
    check_point.save(folder)
    on_engines = predict(X)
    flow.config.reset()

    def on_one_device(rank: int) -> Any:
        check_point.load(folder)
        return predict(X)

    np.testing.assert_allclose(run_ranks(on_one_device, 1)[0], on_engines, rtol=1e-5, atol=1e-6)
    check_point.init()
    assert not np.allclose(predict(X), on_engines)  # zeros, by default
    check_point.load(folder)
    np.testing.assert_array_equal(predict(X), on_engines)


def _error_shows_the_users_line() -> None:
    @flow.global_function()
    def wrong(x: tp.Numpy.Placeholder((4, 512))) -> tp.Numpy:
        sys.stdout.write("in the body\n")
        return x @ x  # this line is shown

    with pytest.raises(CellError, match=r"test_job_engines\.py line \d+, in .*wrong") as caught:
        wrong(X)
    (line,) = (line for line in str(caught.value).splitlines() if "this line is shown" in line)
    assert line.strip().startswith("▶")


def _lost_variables_are_noticed(session: Session) -> None:
    forget = "from workbench.flow.jobs import remote, store; store._stores.clear(); remote._jobs.clear()"
    session.run(forget, ranks=[1])  # what a new process in the place of rank 1 would not know
    with pytest.raises(CellError, match="the process of rank 1 is another one than in the calls before"):
        predict(X)
    flow.train.CheckPoint().init()
    assert (predict(X) == 0).all()
