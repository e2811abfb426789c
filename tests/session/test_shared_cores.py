"""The environment of an engine, and its share of the host's cores."""

from __future__ import annotations

import pytest

from workbench.core import cores
from workbench.session import engine
from workbench.session.processes.launch import rank_environment

NAMES = ("OMP_NUM_THREADS", "WORKBENCH_NUM_THREADS")
num_cores = cores.num_cores


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose user has not chosen a number of threads."""
    monkeypatch.setattr(cores, "num_cores", lambda: 16)
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)


def test_rank_environment():
    environment = rank_environment(3, 4, gpus=["a", "b"])
    assert environment["RANK"] == environment["LOCAL_RANK"] == "3"
    assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "4"
    assert environment["CUDA_VISIBLE_DEVICES"] == "b"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(0, 2)


@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", 16), ("350000 100000", 4), ("50000 100000", 1), ("", 16), ("-1 100000", 16)]
)
@pytest.mark.parametrize("files", cores._QUOTA_FILES)
def test_a_container_may_have_the_time_of_fewer_cores(tmp_path, monkeypatch, files, limit, expected):
    """On a host with 64 cores, each of two engines had 32 threads, and all of them the time of 4 cores."""
    for name, text in zip(files, [limit] if len(files) == 1 else limit.split(), strict=False):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(cores, "_QUOTAS", tmp_path)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: range(16), raising=False)
    assert num_cores() == expected


def test_a_number_of_threads_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr("torch.set_num_threads", pytest.fail)
    assert "OMP_NUM_THREADS" not in rank_environment(0, 2)
    engine._share_cores(2)


@pytest.mark.parametrize(("is_local", "expected"), [(True, [2, 16]), (False, [8, 2, 16])])
def test_cores_are_shared_anew_when_the_number_of_ranks_changes(
    is_local: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Without a change nothing is set: a cell may have set another number."""
    numbers: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", numbers.append)
    for name, number in rank_environment(0, 2).items():
        if is_local and name in NAMES:
            monkeypatch.setenv(name, number)
    for num_ranks in (2, 8, 8, 1):
        engine._share_cores(num_ranks)
    assert numbers == expected
