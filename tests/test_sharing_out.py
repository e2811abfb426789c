"""Sharing out the tests between workers: each runs once, files with processes stay whole and leave one worker free."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist")

from tests.sharing_out import SharingOut

ROOT = Path(__file__).parent.parent
REAL = ["tests/cli/test_doctor.py", "tests/flow/test_job_processes.py", "tests/test_readme.py", "tests/test_wheel.py"]
ENGINES = ["tests/session/test_adapter.py", "tests/session/test_compare.py"]
COMPUTING = ["tests/core/test_route.py", "tests/core/test_presets.py", "tests/core/test_covering.py"]


class Worker:
    """As a worker of xdist: a test begins when it is known which comes next, or that none does."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.todo: list[int] = []
        self.ran: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.todo += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def runs(self) -> bool:
        return len(self.todo) > 1 or (self.shutting_down and bool(self.todo))


def collected() -> list[str]:
    files = [*REAL, *ENGINES, *COMPUTING]
    plain = [f"{file}::test_{number}" for file in files for number in range(5)]
    return [*plain, *(f"{file}::test_of[{number}]" for file in files for number in range(4))]


def share_out(num_workers: int, seed: int) -> tuple[list[Worker], list[int]]:
    """The workers after all tests, each of which took any time; how many had a file with processes, test by test."""
    config: Any = SimpleNamespace(
        rootpath=ROOT, option=SimpleNamespace(loadscopereorder=True, tx=["popen"] * num_workers), getvalue=None
    )
    config.getvalue = lambda name: getattr(config.option, name)
    scheduling = SharingOut(config, None)
    workers: list[Any] = [Worker(f"gw{number}") for number in range(num_workers)]
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, collected())
    scheduling.schedule()
    chance, together = random.Random(seed), []
    while running := [worker for worker in workers if worker.runs]:
        at_work = [collected()[worker.todo[0]].partition("::")[0] for worker in running]
        waiting = any(name.startswith("tests/core") for name in scheduling.workqueue)
        together.append(sum(file not in COMPUTING for file in at_work) if waiting else 0)
        worker = chance.choice(running)
        worker.ran.append(worker.todo.pop(0))
        scheduling.mark_test_complete(worker, worker.ran[-1])
    return workers, together


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_all_run_once_and_files_with_processes_stay_whole(num_workers: int, seed: int) -> None:
    workers, together = share_out(num_workers, seed)
    assert sorted(number for worker in workers for number in worker.ran) == list(range(len(collected())))
    assert max(together) <= num_workers - 1
    ran_by = [{collected()[number].partition("::")[0] for number in worker.ran} for worker in workers]
    assert all(sum(file in files for files in ran_by) == 1 for file in REAL)
    assert sum(bool(files & set(ENGINES)) for files in ran_by) == 1, "they share the engines of one session"
