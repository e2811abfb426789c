"""What is left when a notebook leaves a session or a cell half way; no engines are needed."""

import errno
from types import SimpleNamespace

import pytest

from workbench.errors import SessionError
from workbench.session import Session
from workbench.session.processes.folder import SessionFolder


def bare_session(path, **pool):
    """A session of no engines."""
    session = Session.__new__(Session)
    session._use(SimpleNamespace(live=None, num_engines=2, **pool), SessionFolder(path), keep=True)
    return session


def test_a_session_that_cannot_be_detached_is_as_it_was(tmp_path, monkeypatch):
    """On a full disk it ended, and its folder named an owner, so that no notebook could take the engines over."""
    left = []
    session = bare_session(tmp_path, detach=lambda: left.append("engines"))
    session._folder.record([], keep=True)

    def fail(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(type(tmp_path), "write_text", fail)
        with pytest.raises(SessionError, match=r"No space left on device.*is as it was. Make room and detach again"):
            session.detach()
    assert left == [] and session._folder.owner() is not None
    session.detach()
    assert left == ["engines"] and session._folder.owner() is None


def test_a_cell_that_has_not_begun_ends_no_live_view(tmp_path, monkeypatch):
    """It was interrupted while it waited for a cell of another thread, whose loop goes on."""
    session, heard = bare_session(tmp_path, tag=lambda *_, **__: SimpleNamespace(run=1)), []
    session.subscribe(lambda rank, message: heard.append(message))

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "report_wait", interrupt)
    with session._requests.exclusive(), pytest.raises(KeyboardInterrupt):
        session.run_cell("1 + 1")
    assert heard == []
    session._forget()
