"""A second notebook, or a terminal, looks at engines that serve another one, also while a cell is stuck there."""

import os
import signal
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from IPython.core.error import UsageError

from tests.session.another_notebook import first_notebook, kill, own_folder  # noqa: F401
from tests.timeouts import wait_until
from workbench import cli
from workbench.errors import NotStartedError, SessionError
from workbench.session import cluster, magic_commands, text_reports
from workbench.session.adapter import Engines
from workbench.session.observed_session import ObservedSession, observe
from workbench.session.processes import discovery, folder
from workbench.session.processes.launch import LocalProcesses

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("own_folder")]

STUCK = """
import os, threading
session.run("kept = 7")
def work():
    for number in range(3):
        while number == 2 and not os.path.exists(__file__ + ".go"):
            time.sleep(0.05)
        try:
            session.run("print('before it, round', kept, flush=True)\\nimport time\\nwhile True: time.sleep(0.1)")
        except BaseException as error:
            print("rank 1 died" if "rank 1 died while running" in str(error) else type(error).__name__, flush=True)
            session.run("kept += 1")
worker = threading.Thread(target=work, daemon=True)
worker.start()
while not all(each.busy for each in session.status()):
    time.sleep(0.05)
"""


def options(**given):
    return SimpleNamespace(**{"name": None, "ranks": None, "lines": 20, "engines": None, "new": False, **given})


def terminal(capsys, *arguments):
    """The exit code of a command, and what it printed."""
    code = cli.main(arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_while_a_cell_is_stuck_elsewhere(tmp_path, capsys):
    first = first_notebook(tmp_path, STUCK, engines=2, keep=False)
    whose = f"process {first.process.pid} ({tmp_path / 'first.py'})"
    try:
        magic_commands.attach(options())
        assert f"looks at 2 engines on cpu that serve {whose}" in capsys.readouterr().out
        magic_commands.status(options())
        assert capsys.readouterr().out.count("busy: at cell line 3") == 2
        magic_commands.dump(options(ranks="1"))
        dumped = capsys.readouterr().out
        assert "rank 1 " in dumped and "while True: time.sleep(0.1)" in dumped and "rank 0 " not in dumped
        magic_commands.log(options(ranks="0"))
        assert "  before it, round 7\n" in capsys.readouterr().out
        for refused in (lambda here: here.run("1"), lambda here: here.restart(), lambda here: here.push(x=1)):
            with pytest.raises(SessionError, match=r"serve process .*first\.py.* one notebook at a time.*detach"):
                refused(cluster.current())
        with pytest.raises(UsageError, match="First: %workbench detach"):
            magic_commands.start(options())
        with pytest.raises(UsageError, match="To look no longer: %workbench detach"):
            magic_commands.stop(options())

        magic_commands.interrupt(options())
        assert "ranks 0-1 were running at cell line 3" in capsys.readouterr().out
        assert first.process.stdout.readline() == b"CellError\n"
        wait_until(lambda: terminal(capsys, "status")[1].count("busy: at cell line 3") == 2, "the next cell")
        code, out, _ = terminal(capsys, "interrupt")  # from a terminal, while the notebook looks, too
        assert code == 0 and "at cell line 3" in out and whose in out.splitlines()[0]
        assert first.process.stdout.readline() == b"CellError\n"
        wait_until(lambda: "busy" not in terminal(capsys, "status")[1], "the end of the cell")
        assert "no rank runs anything" in terminal(capsys, "interrupt")[1]
        assert terminal(capsys, "dump", "--ranks", "5")[::2] == (cli.USER_ERROR, terminal_error("5"))
        magic_commands.detach(options())
        assert cluster.find_current() is None
        magic_commands.attach(options())

        (tmp_path / "first.py.go").touch()
        wait_until(lambda: terminal(capsys, "status")[1].count("busy: at cell line 3") == 2, "the last cell")
        os.kill(cluster.current().status()[1].pid, signal.SIGSTOP)
        code, out, _ = terminal(capsys, "interrupt")  # it is killed
        assert code == 0 and "rank 1 did not react to an interrupt" in out and "its variables are lost" in out
        assert first.process.stdout.readline() == b"rank 1 died\n"
    finally:
        kill(first)
    wait_until(lambda: not cluster.current()._facts.is_alive(), "the end of the session")
    with pytest.raises(NotStartedError, match="has ended"):
        magic_commands.status(options())
    assert cluster.find_current() is None
    code, _, err = terminal(capsys, "status")
    assert code == cli.USER_ERROR and "no engines of yours run on this host" in err


def terminal_error(rank):
    said = f"workbench dump: ranks '{rank}': rank {rank} does not exist. The session has 2 engines, so ranks go"
    return f"{said} from 0 to 1.\n"


def entry(facts_of, pid):
    """One more session of this user, as another notebook would have it."""
    other = folder.SessionFolder.create()
    other._write(**{**facts_of._state(), "owner": asdict(folder.ProcessId.of(pid))})
    return other


def test_a_resize_by_their_own_notebook_is_followed(monkeypatch):
    there, here = folder.SessionFolder.create(), folder.ProcessId.of(os.getpid())
    facts = {number: folder.EngineFacts(here, dict.fromkeys(range(number), here), (), 0.0) for number in (1, 2, 4)}
    asked = []
    client = SimpleNamespace(ids=range(4), close=lambda linger: None)
    monkeypatch.setattr(LocalProcesses, "observe", lambda processes, facts: client)
    monkeypatch.setattr(Engines, "control", lambda engines, *_: asked.append(engines.registered()) or {})
    session = ObservedSession(there, facts[2])
    for number in (2, 4, 1):
        there.record([], facts[number])
        assert session.num_engines == number and f": {number} engine" in session.title
        assert text_reports.ranks_of(session, str(number - 1)) == (number - 1,)
        assert [each.rank for each in session.status()] == asked[-1] == list(range(number))
    session.close()


@pytest.mark.slow
def test_one_of_several_is_chosen_by_its_name(tmp_path, capsys):
    with cluster.Session(engines=1, device="cpu", keep=True) as session:
        name = discovery.name_of(session._folder)
        entry(session._folder, os.getppid())
        code, _, err = terminal(capsys, "status")
        assert code == cli.USER_ERROR and "2 sessions run on this host. Name it with --session NAME:" in err
        assert f"    {name}: 1 engine on cpu, started " in err and f"used by process {os.getppid()}" in err
        code, out, _ = terminal(capsys, "status", "--session", name)
        assert code == 0 and out.startswith(f"{name}: 1 engine on cpu") and "rank 0  pid" in out
        with pytest.raises(SessionError, match=r"none of them is called 'nobody'"):
            observe("nobody")
    magic_commands.attach(options(name=name))  # left by its notebook, so this is more than looking
    assert cluster.current().run("wb.rank()").values == [0]
    cluster.current().close()
