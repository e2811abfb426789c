"""Protocol, escalation, request queue, folder: the parts that need no engine."""

import os
import pickle
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tests.timeouts import WAIT_TIMEOUT_S, wait_until
from workbench.session import cluster, engine_pool, magic_commands, protocol
from workbench.session.adapter import Request
from workbench.session.engine_pool import EnginePool
from workbench.session.magic import SessionMagics, _parse, unload_ipython_extension
from workbench.session.notebook_imports import offer_magics
from workbench.session.output.log import MAX_RUNS, OutputLogs
from workbench.session.output.tracebacks import Interrupted, cell_error
from workbench.session.processes import discovery, folder, watchdog
from workbench.session.processes.core_waits import CoreWaits
from workbench.session.request_queue import RequestQueue
from workbench.session.run import NullListener, Run
from workbench.session.stop_escalation import STEPS, StopEscalation


def test_a_session_in_a_notebook_makes_its_magics_known(monkeypatch, capsys):
    """``wb.Session(2)`` in a cell, ``%%global`` in the next one: nobody has loaded the extension."""
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    try:
        assert shell.find_cell_magic("global") is None
        offer_magics()
        assert shell.find_cell_magic("global") and shell.find_line_magic("workbench")
        monkeypatch.setattr(cluster, "find_current", lambda: "<Session: 1 engine on cpu>")
        unload_ipython_extension(shell)  # as %reload_ext does first, which ended the engines
        assert "<Session: 1 engine on cpu>' stays; %workbench stop ends it" in capsys.readouterr().out
    finally:
        InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stop --ranks 1", "stop takes no --ranks, so nothing was done. It is an option of restart, log, dump, debug."),
        ("restart --eng=4", "restart takes no --engines"),
        ("log --ranks 1 --rank 0", "--ranks is there twice"),
    ],
)
def test_an_option_that_a_command_does_not_take_is_no_option(line, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        magic_commands.check_options(line, line.split()[0])
    magic_commands.check_options("log --lines 3 --ranks '0,1'", "log")


def test_the_help_of_each_option_names_the_commands_that_take_it():
    helps = {each.option_strings[0]: each.help for each in SessionMagics.line_workbench.parser._actions[2:]}
    takers = {option: set(helps[option].partition(":")[0].replace(",", "").split()) - {"--hosts"} for option in helps}
    assert takers == {
        option: {name for name, options in magic_commands.OPTIONS.items() if option in options.split()}
        for option in helps
    }
    assert set(magic_commands.OPTIONS) <= set(magic_commands.COMMANDS)


def test_quotes_belong_to_no_option():
    options = _parse(SessionMagics.cell_global, "--ranks '0,1' --label=\"my cell\"")
    assert (options.ranks, options.label) == ("0,1", "my cell")


@pytest.mark.parametrize("asked", [{"engines": 3}, {"device": "cuda"}, {"keep": True}, {"hosts": "a,b"}])
def test_start_says_what_a_running_session_is_not(monkeypatch, asked, capsys):
    running = SimpleNamespace(num_engines=2, device="cpu", keep=False, places={"profile": "p"})
    monkeypatch.setattr(magic_commands.cluster, "find_current", lambda: running)
    none = dict.fromkeys(("engines", "profile", "hosts", "slurm", "python"))
    magic_commands.start(SimpleNamespace(**none | {"profile": "p"}, device="auto", keep=False))
    assert "a session with 2 engines on cpu is running already" in capsys.readouterr().out
    with pytest.raises(UsageError, match=f"start --{next(iter(asked))}.*was not started so"):
        magic_commands.start(SimpleNamespace(**{**none, "device": "cpu", "keep": False, **asked}))


def test_tag_prints_and_parses():
    tag = protocol.CellTag(7, all_ranks=True, wants_values=True, label='load "shards"')
    assert protocol.CellTag.parse(str(tag)) == tag
    assert protocol.CellTag.parse("somebody else's label") is None
    assert protocol.CellTag.parse(None) is None


def test_values_come_back():
    assert protocol.load(protocol.dump({"a": [1, 2]})) == {"a": [1, 2]}


def test_a_large_value_becomes_a_placeholder_that_names_the_way_out():
    value = protocol.load(protocol.dump_or_omit(bytes(2_000_000), limit_bytes=1_000_000))
    assert isinstance(value, protocol.OmittedValue)
    assert "1.00 MB" in repr(value)
    assert "session.pull" in repr(value)


def test_a_value_at_the_limit_is_sent():
    payload = protocol.dump(bytes(1000))
    assert protocol.load(protocol.dump_or_omit(bytes(1000), limit_bytes=len(payload))) == bytes(1000)


def test_a_value_that_cannot_be_pickled_becomes_a_placeholder():
    assert "cannot be pickled" in repr(protocol.load(protocol.dump_or_omit(threading.Lock())))


def test_escalation_takes_every_step_once_in_order():
    escalation = StopEscalation(10.0)
    assert escalation.due(10.0) == "interrupt"
    assert escalation.due(10.0) == ""
    assert escalation.wakeup() == pytest.approx(10.25)
    assert [escalation.due(now) for now in (10.3, 10.7, 11.2, 11.7, 11.9)] == [step for _, step in STEPS[1:]]
    assert escalation.wakeup() is None and escalation.due(20.0) == ""


def test_a_notebook_that_comes_late_leaves_ranks_their_time_to_react():
    escalation = StopEscalation(10.0)
    assert [escalation.due(now) for now in (14.0, 14.1, 14.3)] == ["interrupt", "", "abort"]


def test_the_time_in_which_ranks_wait_for_a_core_does_not_count():
    escalation = StopEscalation(10.0, waited_s=7.0)
    assert escalation.due(10.0, waited_s=7.0) == "interrupt"
    assert escalation.due(10.3, waited_s=7.2) == ""
    assert escalation.wakeup() == pytest.approx(10.45)
    assert escalation.due(10.5, waited_s=7.2) == "abort"


def test_escalation_ends_within_two_seconds_with_a_kill():
    assert STEPS[-1][1] == "kill"
    assert sum(after_s for after_s, _ in STEPS) <= 1.6


def test_waits_for_a_core_are_those_of_the_thread_that_waited_longest(tmp_path):
    def tell(*waited_s):
        for pid, wait_s in zip((os.getpid(), 5, 6), waited_s, strict=True):
            thread = tmp_path / str(pid) / ("" if pid == os.getpid() else "task/9")
            thread.mkdir(exist_ok=True, parents=True)
            (thread / "schedstat").write_text(f"1000 {wait_s * 10**9} 3\n")

    tell(2, 1, 10)
    waits = CoreWaits([5, 6, 7], tmp_path)  # 7 has ended
    assert waits.longest_s() == 0
    tell(2, 4, 11)
    assert waits.longest_s() == 3
    tell(7, 4, 11)
    assert waits.longest_s() == 5
    (tmp_path / "5" / "task" / "10").mkdir()
    (tmp_path / "5" / "task" / "10" / "schedstat").write_text(f"1000 {6 * 10**9} 3\n")  # a thread that is new
    assert waits.longest_s() == 6


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this system does not tell")
def test_processes_on_one_core_wait_for_it():
    on_one_core = "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    program = f"{on_one_core}\nwhile time.process_time() < 0.3: pass"
    first, second = (subprocess.Popen([sys.executable, "-S", "-c", program]) for _ in range(2))
    waits = CoreWaits([first.pid, second.pid])
    wait_until(lambda: waits.longest_s() > 0.02)
    assert (first.wait(), second.wait()) == (0, 0)


def test_an_interrupt_before_its_turn_leaves_no_ticket():
    requests = RequestQueue()
    first = requests.enqueue()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), requests.exclusive(on_wait=interrupt):
        pass
    for ticket in (first, None):
        with requests.exclusive(ticket):
            pass


def test_an_interrupt_while_engines_start_says_what_comes_next():
    """The next cell joins all ranks, also if the new one has come meanwhile."""

    def interrupt(*_):
        raise KeyboardInterrupt

    processes = SimpleNamespace(num_ranks=2, kill=list, start_engines=interrupt)
    pool = EnginePool(processes, "cpu", folder=None)
    pool._engines = SimpleNamespace(client=None, wait_until_gone=list)
    with pytest.raises(Interrupted, match=r"while engines were starting\. The next cell starts those again"):
        pool.replace([1])
    assert pool._world_is_stale


def test_a_run_that_begins_while_its_session_is_closed_ends(monkeypatch):
    """Its engines are there when it takes them, and gone before it is among the active runs."""
    processes = SimpleNamespace(num_ranks=2, pids=list, how_ended=lambda rank: "killed")
    pool = EnginePool(processes, "cpu", folder=None)
    pool._engines = SimpleNamespace(close=list, forget=list, control=lambda *_: {}, wait_until_gone=list)

    class Slow(Run):
        def __init__(self, *args):
            super().__init__(*args)
            pool.leave()

    monkeypatch.setattr(engine_pool, "Run", Slow)
    outcome = pool.follow(Request((0, 1)), NullListener(), timeout_s=20.0)
    assert set(outcome.dead) == {0, 1} and outcome.reason == "closed"
    told = "The session was closed, or left to another notebook, while ranks 0-1 ran this call."
    assert str(cell_error(outcome, "call")) == told, "detached engines are alive, and no cell starts them again"


def test_engines_that_end_while_others_start_are_started_too():
    started, told, ended = [], [], iter([{0}, set()])
    processes = SimpleNamespace(
        num_ranks=2, kill=list, start_engines=lambda _client, ranks, _listener: started.append(ranks) or ranks
    )
    pool = EnginePool(processes, "cpu", folder=None)
    pool._engines = SimpleNamespace(client=None, wait_until_gone=list, assign=zip, control=lambda *_: {})
    pool._join_or_find_lost, pool._describe_loss = lambda _: next(ended), told.append
    pool.replace([1])
    assert started == [[1], [0]] and told == [[0]] and pool.losses.ranks == {0, 1}


def test_requests_are_first_come_first_served():
    requests, order = RequestQueue(), []
    tickets = [requests.enqueue() for _ in range(3)]

    def use(number):
        with requests.exclusive(tickets[number]):
            order.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in (2, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert order == []
    use(0)
    for thread in threads:
        thread.join(WAIT_TIMEOUT_S)
    assert order == [0, 1, 2]


@pytest.fixture
def temp_base(tmp_path, monkeypatch):
    path = tmp_path / "new" / "sessions"
    monkeypatch.setenv(folder.BASE_VARIABLE, str(path))
    return path


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_folders_are_private(temp_base):
    made = folder.SessionFolder.create()
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert made.path.parent == temp_base and temp_base.stat().st_mode & 0o777 == 0o700
    assert list(folder.stale_folders()) == []


def test_leftovers_of_a_dead_owner_are_reaped(temp_base, sleeper):
    made = folder.SessionFolder.create()
    made.record([folder.ProcessId.of(sleeper.pid)])
    state = made.path / "session.json"
    state.write_text(state.read_text().replace(f'"pid": {os.getpid()}', '"pid": 999999999'))
    assert folder.reap_stale_sessions() == 1
    assert sleeper.wait(WAIT_TIMEOUT_S) == -9
    assert not made.path.exists()


def test_a_process_with_the_same_number_but_another_start_is_spared(temp_base, sleeper):
    real = folder.ProcessId.of(sleeper.pid)
    other = replace(real, started=real.started - 100)
    other.kill()
    assert other.find() is None
    assert real.find() is not None
    assert psutil.pid_exists(sleeper.pid)


def test_a_process_is_found_again_after_the_clock_was_set(sleeper, monkeypatch):
    """psutil adds the time of the boot, which Linux computes from the present time."""
    known = folder.ProcessId.of(sleeper.pid)
    assert folder.ProcessId.parse(str(known)) == known
    created = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created(process) + 3600)
    assert known.find().pid == sleeper.pid
    assert watchdog.is_running(str(known))() and not known.has_ended()
    sleeper.kill()
    sleeper.wait(WAIT_TIMEOUT_S)
    assert known.find() is None and known.has_ended()
    assert folder.ProcessId.of(sleeper.pid).has_ended()


def test_a_session_outlives_a_change_of_its_hosts_name(temp_base, sleeper, monkeypatch):
    known = folder.ProcessId.of(sleeper.pid)
    monkeypatch.setattr("socket.gethostname", lambda: "alpha.of-another-network")
    assert known.find().pid == sleeper.pid


OTHERS = {
    "another host": ({"boot": "b", "host": "h"}, False),
    "a container of this host": ({"namespace": "pid:[1]", "host": "c"}, False),
    "a container with this host's name": ({"namespace": "pid:[1]"}, False),
    "this host, before its last boot": ({"boot": "b"}, True),
}


@pytest.mark.parametrize("is_left", [False, True], ids=["owned", "left"])
@pytest.mark.parametrize("where", OTHERS)
def test_folders_of_others_in_a_shared_place_are_spared(temp_base, where, is_left):
    """Their processes are not among those of this host, and may run all the same."""
    place, is_stale = OTHERS[where]
    there = replace(folder.ProcessId.of(os.getpid()), **place)
    made = folder.SessionFolder.create()
    made.record([there], folder.EngineFacts(there, {0: there}, (), 0.0), keep=is_left)
    made._write(owner=None if is_left else asdict(there))
    assert there.find() is None
    assert folder.reap_stale_sessions() == is_stale
    assert made.path.exists() is not is_stale
    assert discovery._alive() == []


def test_a_session_is_not_taken_from_an_owner_elsewhere(temp_base):
    made = folder.SessionFolder.create()
    there = replace(folder.ProcessId.of(os.getpid()), namespace="pid:[1]")
    made._write(owner=asdict(there))
    assert made.claim() == there and made.is_in_use()
    made._write(owner=asdict(replace(there, boot="b")))
    assert made.claim() is None and made.owner() == folder.ProcessId.of(os.getpid())


def test_folders_of_version_0_2_are_ignored(temp_base):
    made, process = folder.SessionFolder.create(), {"pid": 999_999_999, "started_s": 1.5}
    made._write(
        owner=process,
        processes=[process],
        engines={"controller": process, "engines": {"0": process}, "gpus": [], "since_s": 0.0},
        keep=True,
    )
    assert discovery._alive() == [] and not made.is_in_use()
    assert folder.reap_stale_sessions() == 0 and made.path.exists()
    made.reap()


def test_functions_that_travel_keep_the_name_of_their_file():
    """cloudpickle 3.1.3 leaves it out, and tracebacks would show no lines of the user's."""
    outer = pickle.loads(protocol.dump(lambda: lambda: 1))
    assert outer.__code__.co_filename == outer().__code__.co_filename == __file__


def test_a_request_goes_out_again_when_an_engine_ends_before_it():
    """A killed engine is still registered when the pool looks, and has no address any more when the request is sent."""
    registered, replaced = [1], []

    class Pool(EnginePool):
        live = SimpleNamespace(registered=lambda: registered)

        def __init__(self):
            pass

        def prepare(self, targets):
            replaced.append(targets)

    addresses = {1: "b"}

    def request(live):
        if len(replaced) == 2:
            addresses[0] = "a"
        return [addresses[rank] for rank in (0, 1)]

    assert Pool().send((0, 1), request) == ["a", "b"] and len(replaced) == 2
    registered.append(0)
    with pytest.raises(KeyError, match="other"):
        Pool().send((0, 1), lambda live: addresses["other"])


def test_old_output_that_cannot_be_removed_stops_no_cell(tmp_path):
    """Each further cell ended in an OSError, where a disk had become read-only for example."""
    for run in range(MAX_RUNS):
        (tmp_path / f"cell-{run:05d}-rank-1.log").touch()
    (tmp_path / "cell-00000-rank-0.log").mkdir()  # which no unlink removes
    log = OutputLogs(tmp_path).begin(MAX_RUNS)
    log.write(0, "printed")
    log.close()
    remaining = {path.name for path in tmp_path.iterdir()}
    assert {"cell-00000-rank-0.log", "cell-00001-rank-1.log", f"cell-{MAX_RUNS:05d}-rank-0.log"} <= remaining
    assert "cell-00000-rank-1.log" not in remaining
