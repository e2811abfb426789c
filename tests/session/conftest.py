"""One cluster of two engines for all tests that need real ones."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from workbench.session import Session
from workbench.session.recovery import Losses, SetupCells


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines: needs real ipyparallel engines (seconds, not milliseconds)")


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Shells start background jobs with SIGINT ignored, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def shared_session() -> Iterator[Session]:
    with Session(engines=2, device="cpu") as session:
        yield session


@pytest.fixture
def session(shared_session: Session) -> Session:
    """The shared session, with both engines idle and without variables of earlier tests."""
    _forget_variables(shared_session)
    return shared_session


@pytest.fixture(scope="module")
def own_session(shared_session: Session) -> Iterator[Session]:
    """The shared session for a module whose tests go on from one another: nothing was lost, no cell is set-up, and all
    that they do to it is undone.
    """
    _forget_variables(shared_session)
    _forget_losses(shared_session)
    yield shared_session
    if shared_session.num_engines != 2:
        shared_session.resize(2)
    _forget_losses(shared_session)


def _forget_losses(session: Session) -> None:
    session._setup, session._pool.losses = SetupCells(), Losses(number=session._pool.losses.number)


def _forget_variables(session: Session) -> None:
    session.run("""
kept = {"wb", "torch", "In", "Out", "exit", "quit", "open", "get_ipython"}
for name in [name for name in globals() if not name.startswith("_") and name not in kept]:
    del globals()[name]
globals().pop("name", None)
""")
