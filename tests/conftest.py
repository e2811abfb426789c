"""The order of the tests, and what all of them share."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.sampling import mark_what_is_not_sampled
from tests.timeouts import PAGE_TIMEOUT_S, PROGRAM_TIMEOUT_S

atexit.register(gc.unfreeze)  # extension modules tell of objects that are left; others collect garbage before, slowly

_REAL = ("procs", "engines", "browser")
_LATER = (*_REAL, "slow")
_LIMITS_S = dict.fromkeys(_LATER, 2 * PROGRAM_TIMEOUT_S) | {"browser": 4 * PAGE_TIMEOUT_S}
"""Of whole tests by marker, the longest that fits: such a test waits several times, and each wait says what for."""

_BROWSER = "tests/browser/"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes milliseconds first, so that a mistake shows before a browser has started; in the order of the files.
    And each gets the limit of its kind, unless it has its own.

    Shared out between workers, what takes longest comes first, else one of them would end alone with it; and between
    files that wait for processes half of their time come files that compute.
    """
    mark_what_is_not_sampled(items)
    costs = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        costs[item] = sum(2**place for place, name in enumerate(_LATER) if name in marks)
        limits = [limit_s for name, limit_s in _LIMITS_S.items() if name in marks]
        if limits and "timeout" not in marks:
            item.add_marker(pytest.mark.timeout(max(limits)))
    shared_out = hasattr(config, "workerinput")
    items.sort(key=costs.__getitem__, reverse=shared_out)
    if shared_out:
        _mix(items, costs)


def _mix(items: list[pytest.Item], costs: dict[pytest.Item, int]) -> None:
    """Spread the files with real processes over the first two thirds, in their order, and the others over all."""
    is_real: dict[Path, bool] = {}
    for item in items:
        is_real[item.path] = is_real.get(item.path, False) or costs[item] % 2 ** len(_REAL) > 0
    real, others = ([path for path, found in is_real.items() if found == wanted] for wanted in (True, False))
    places = {path: 2 / 3 * number / len(real) for number, path in enumerate(real)}
    places |= {path: number / len(others) for number, path in enumerate(others)}
    items.sort(key=lambda item: places[item.path])


def pytest_configure() -> None:
    """Before there are workers: they share the server of this command.

    What a shell has put into the background ignores interrupts, and so would all programs that tests start.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    warm.executable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: real processes are waited for."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where workers get whole files, one of them gets all files of browser tests, which share a server and a page."""
    from xdist.scheduler import LoadFileScheduling

    class BrowserTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _BROWSER if file.startswith(_BROWSER) else file

    return BrowserTogether(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_sessionstart() -> None:
    """Importing all of it leaves hardly any garbage, and looking for some takes a quarter of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Spare each later collection of garbage thousands of tests and all of torch: a third of the time of some tests."""
    _set_aside()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """And what the tests of a file have left in caches: a recorded step collects garbage, in the end a second each."""
    if nextitem is not None and nextitem.path != item.path:
        _set_aside()


def _set_aside() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs and sessions of tests, also in the kernels and engines that they start, are none of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("WORKBENCH_SESSIONS", str(tmp_path_factory.mktemp("sessions")))
        yield


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new notebook: sessions of other tests are not found, and what the test leaves open is closed."""
    from workbench.session import cluster

    monkeypatch.setattr(cluster, "_open", [])
    yield
    while (session := cluster.find_current()) is not None:
        session.close()


@pytest.fixture(autouse=True)
def no_session_of_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test without engines finds no session, whatever files have run before it in this process."""
    cluster: Any = sys.modules.get("workbench.session.cluster")
    if cluster is None or not cluster._open or request.node.get_closest_marker("engines"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_open", [])
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_fork_server() -> Iterator[None]:
    """Sessions of all tests of this process fork their engines from one process, which loads torch once."""
    from workbench.session.processes import fork_server

    fork_server.keeps_servers = True
    yield
    fork_server.keeps_servers = False
    for server in [each for each in fork_server._servers if not each.users]:
        server.close()
