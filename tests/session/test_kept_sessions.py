"""Engines that outlive their notebook: a second one finds them with their variables, or ends them."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from IPython.core.error import UsageError

from tests.session.another_notebook import first_notebook, kill, own_folder  # noqa: F401
from tests.timeouts import PROMPT_S, WAIT_TIMEOUT_S, wait_until
from workbench.errors import SessionError
from workbench.session import Session, cluster, engine_pool, magic_commands, protocol
from workbench.session.observed_session import observe
from workbench.session.processes import discovery, folder

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("own_folder")]


def options(**given):
    none = dict.fromkeys(("engines", "profile", "hosts", "slurm", "python"))
    return SimpleNamespace(**none | {"device": "cpu", "new": False, "keep": False} | given)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_second_notebook_goes_on_where_the_first_was_killed(tmp_path):
    first = first_notebook(tmp_path, "session.run('kept = 41 + wb.world_size()')")
    with pytest.raises(SessionError, match=rf"used by process {first.process.pid}"):
        Session.attach()
    observed = observe()
    kill(first)
    with pytest.raises(SessionError, match=r"serve no notebook any more.*%workbench detach, then %workbench attach"):
        observed.run("kept")
    observed.detach()
    time.sleep(1.2)  # longer than an orphan lives
    found = discovery.unused_sessions()
    assert [(each.num_engines, each.device) for each in found] == [(1, "cpu")]
    with pytest.raises(UsageError, match=r"(?s)still there, with their variables.*1 engine on cpu.*%workbench attach"):
        magic_commands.start(options())

    session = Session.attach(found[0].name)
    processes = session._folder.processes()
    assert session.status()[0].pid == first.pid
    assert session.run("x = wb.ones(2, placement=wb.placement.all('cpu'), sbp=wb.sbp.split(0)); kept").values == [
        42 - 0
    ]
    assert session.run("float(x.sum().to_local())").values == [2.0]
    session.close()
    assert not any(process.find() for process in processes)
    assert not os.path.exists(first.folder)
    assert discovery.kept_sessions() == []


def test_runs_of_a_later_notebook_have_larger_numbers():
    """Whatever it has loaded earlier: an interrupt of its waiting cell stops the cell of a notebook that is gone."""
    script = "from workbench.session.protocol import next_run as n; print(n(), n(), flush=True); input(); print(n())"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as other:
        first, second = map(int, other.stdout.readline().split())
        here = protocol.next_run()
        last = int(other.communicate("\n", timeout=WAIT_TIMEOUT_S)[0])
    assert first < second < here < last < protocol.next_run()


@pytest.mark.slow
@pytest.mark.timed
def test_a_cell_that_outlives_its_notebook_is_seen_and_can_be_interrupted(tmp_path, monkeypatch, capsys):
    first = first_notebook(
        tmp_path,
        """
        session.run("import time; kept = 7")
        import threading
        threading.Thread(target=session.run, args=("while True: time.sleep(0.1)",), daemon=True).start()
        while not session.status()[0].busy:
            time.sleep(0.05)
        """,
    )
    kill(first)
    magic_commands.attach(SimpleNamespace(name=None))
    shown = capsys.readouterr().out
    assert "busy: at cell line 1" in shown and "the next cell waits for it" in shown
    session = cluster.current()
    try:
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(engine_pool, "_JOIN_TIMEOUT_S", 0.3)  # it is for the join alone
            with pytest.raises(KeyboardInterrupt):
                session.run("kept")
        assert 1.4 < time.monotonic() - began < PROMPT_S
        assert session.run("kept").values == [7]
    finally:
        session.close()


@pytest.mark.slow
def test_detach_replace_and_clean(tmp_path, monkeypatch, capsys):
    began_in = os.getcwd()
    with Session(engines=1, device="cpu", keep=True) as session:
        session.run("kept = 3")
        pid = session.status()[0].pid
    assert psutil.pid_exists(pid)  # the context's end has left it
    monkeypatch.chdir(tmp_path)
    session = Session.attach()
    psutil.Process(pid).kill()
    wait_until(lambda: not session._live().registered(), "the death of the engine")
    assert session.run("import os\n'kept' in globals(), os.getcwd()").values == [(False, began_in)]
    assert "rank 0 died" in capsys.readouterr().err
    replaced = session.status()[0].pid
    assert replaced != pid
    session.detach()
    session.detach()
    time.sleep(1.2)
    assert psutil.pid_exists(replaced)  # it, too, watches the controller and not the notebook that has started it
    magic_commands.clean(SimpleNamespace())
    assert "ended 1 session of" in capsys.readouterr().out
    wait_until(lambda: not is_alive(replaced), "the end of the engine, which has been killed")


@pytest.mark.slow
def test_engines_end_with_their_controller(tmp_path):
    with Session(engines=1, device="cpu", keep=True) as session:
        made = session._folder
    facts = made.kept()
    facts.controller.kill()
    wait_until(lambda: not any(process.find() for process in facts.engines.values()), "the end of the engines")
    assert discovery.kept_sessions() == []
    assert folder.reap_stale_sessions() == 1
    assert not made.path.exists()


def test_what_cannot_be_kept_or_found_says_why(session):
    with pytest.raises(SessionError, match="end with their controller"):
        Session(engines=1, profile="ours", device="cpu", keep=True)
    with pytest.raises(SessionError, match=r"no engines of an earlier notebook.*kept: none"):
        Session.attach()
    with pytest.raises(SessionError, match="by that name"):
        Session.attach("nobody")
    with pytest.raises(SessionError, match="watch this notebook and end with it"):
        session.detach()
