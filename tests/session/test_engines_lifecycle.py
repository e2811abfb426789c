"""Start, failure to start, and the end of sessions, however it comes."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.nn.functional as F

import workbench as wb
import workbench.session as session_package
from tests.session.test_lost_engines import data, make_model
from tests.timeouts import WAIT_TIMEOUT_S, wait_until
from workbench.core import cores
from workbench.core.strategy import Strategy
from workbench.errors import CellError, EngineStartError, NotStartedError, SessionError
from workbench.session import Session
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject
from workbench.session.processes import discovery, fork_server, launch
from workbench.session.processes.folder import EngineFacts, ProcessId, SessionFolder, all_folders
from workbench.ui.panel import Panel

pytestmark = pytest.mark.engines


def folders():
    """Those of this process: other tests may have sessions at the same time."""
    here = ProcessId.of(os.getpid())
    return {folder.path for folder in all_folders() if folder.owner() == here}


@pytest.fixture
def ending_servers(monkeypatch):
    """Processes that fork engines end with their last session, as in a notebook."""
    monkeypatch.setattr(fork_server, "keeps_servers", False)
    monkeypatch.setenv("OMP_DYNAMIC", "false")  # not that of other tests


@pytest.mark.usefixtures("ending_servers")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("ends", ["while all are awaited", "before all have been started"])
def test_engines_that_fail_to_start_are_reported_with_their_log(ends, tmp_path, monkeypatch):
    if ends.startswith("before"):  # ipyparallel forgets an engine when it has seen the end of its process
        of_all = launch.RankEngineSetLauncher
        monkeypatch.setattr(of_all, "notify_start", lambda engines, _data: engines.launchers.pop("1"))
        monkeypatch.setattr(of_all, "_notice_engine_stopped", lambda _engines, _data: None)
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import os, sys

        def end(event, _arguments):
            if event == "os.chdir" and os.environ.get("RANK") == "1":  # what an engine does first
                print("libdriver.so: version mismatch", file=sys.stderr, flush=True)
                os._exit(3)

        sys.addaudithook(end)
    """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folders_before, children_before = folders(), set(psutil.Process().children(recursive=True))
    started = time.monotonic()
    with pytest.raises(EngineStartError) as caught:
        Session(engines=2, device="cpu")
    assert time.monotonic() - started < launch.START_TIMEOUT_S
    assert "1 of 2 engines (rank 1) ended before they were ready" in str(caught.value)
    assert "libdriver.so: version mismatch" in str(caught.value)
    assert folders() == folders_before
    assert set(psutil.Process().children(recursive=True)) <= children_before


@pytest.mark.usefixtures("ending_servers")
def test_a_fork_server_that_cannot_load_is_reported_with_its_output(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import os, sys
        if "workbench.session.processes.fork_server" in sys.orig_argv:
            print("libtorch.so: no such file", file=sys.stderr, flush=True)
            os._exit(3)
    """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folders_before, children_before = folders(), set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineStartError, match=r"2 of 2 engines \(ranks 0-1\) ended before they were ready") as caught:
        Session(engines=2, device="cpu")
    assert "libtorch.so: no such file" in str(caught.value)
    assert folders() == folders_before
    assert set(psutil.Process().children(recursive=True)) <= children_before


def parents(session):
    return {psutil.Process(pid).parent() for pid in session.run("import os; os.getpid()").values}


def test_engines_have_one_parent(session):
    (server,) = parents(session)
    assert server.pid != os.getpid()


@pytest.mark.slow
@pytest.mark.usefixtures("ending_servers")
def test_engines_have_one_parent_which_ends_with_the_last_session():
    with Session(engines=2, device="cpu") as session:
        (server,) = parents(session)
        session.restart([1])
        assert parents(session) == {server}
        with Session(engines=2, device="cpu") as other:
            assert parents(other) == {server}
        assert server.is_running()
    assert not server.is_running()


def test_the_controller_keeps_nothing_of_what_is_pushed(session):
    """It kept up to 1 GB, as long as the session."""
    controller = session._folder.engines().controller.find()
    before = controller.memory_info().rss
    for number in range(3):
        session.push(pushed=torch.full((10_000_000,), float(number)))
    session.run("del pushed")
    assert controller.memory_info().rss - before < 60e6  # of 240e6 that went through it


def test_engines_draw_random_numbers_of_their_own(session):
    """They are copies of one process, whose libraries have seeded their generators."""
    cell = "import numpy as np, sympy.core.random\n(np.random.rand(), sympy.core.random.random(), torch.rand(1).item())"
    of_numpy, of_sympy, of_torch = map(set, zip(*session.run(cell).values, strict=True))
    assert len(of_numpy) == len(of_sympy) == 2
    assert len(of_torch) == 1  # ranks share torch's, so that their models agree


def test_children_that_end_at_once_are_reaped_by_handlers_that_interrupt_each_other(monkeypatch):
    """The second signal may come while the handler of the first is about to ask for the same process."""
    children = [subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"]) for code in (3, 4)]
    for child in children:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    codes, waitpid, calls = dict.fromkeys([child.pid for child in children]), os.waitpid, []

    def interrupted(pid, options):
        calls.append(pid)
        if len(calls) == 1:
            fork_server.reap(codes)
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", interrupted)
    fork_server.reap(codes)
    assert list(codes.values()) == [3, 4]
    for child in children:
        child.returncode = codes[child.pid]


def test_a_failed_start_quotes_no_engine_of_before():
    processes = launch.LocalProcesses(SessionFolder.create(), 1)
    processes._launchers = {0: SimpleNamespace(get_output=lambda: "of before", forks=None)}
    processes._find_fork_server = lambda: None
    processes._forks = SimpleNamespace(
        is_ready=lambda: False, has_ended=lambda: True, output=lambda: "ImportError: of now"
    )
    with pytest.raises(EngineStartError, match=r"(?s)^(?!.*of before).*ImportError: of now"):
        processes.start_engines(None, [0], lambda number: None)
    processes.folder.remove()


def test_the_end_of_a_session_on_a_full_disk_ends_its_engines(monkeypatch):
    """The list of its processes could not be written, and they went on until the end of the notebook."""
    processes = launch.LocalProcesses(SessionFolder.create(), 1)
    processes.engines = {0: psutil.Popen(["sleep", str(WAIT_TIMEOUT_S)])}
    monkeypatch.setattr(SessionFolder, "record", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    processes.stop()
    assert processes.engines[0].wait() == -signal.SIGKILL and not processes.folder.path.exists()


def test_engines_that_could_not_be_attached_to_wait_for_the_next_try(monkeypatch):
    """They counted as used, by the notebook that had failed or was interrupted, until its end."""
    folder, here = SessionFolder.create(), ProcessId.of(os.getpid())
    monkeypatch.setattr(discovery, "take_over", lambda name: (folder, EngineFacts(here, {0: here}, (), 0.0)))
    monkeypatch.setattr(launch.LocalProcesses, "observe", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Session.attach()
    assert folder.owner() is None
    folder.remove()


@pytest.mark.slow  # two processes that fork engines load torch
@pytest.mark.usefixtures("ending_servers")
def test_a_session_outlives_the_process_that_forks_its_engines(monkeypatch):
    with Session(engines=2, device="cpu") as session:
        server = session._pool._processes._forks._process
        server.kill()
        server.wait()
        with monkeypatch.context() as patch:
            patch.setattr(fork_server.ForkServer, "has_ended", lambda _server: False)  # it ends just after the look
            with pytest.raises(EngineStartError, match="ended before they were ready"):
                session.restart()
        session.restart()
        assert session.run("wb.rank()").values == [0, 1]


@pytest.mark.slow  # three processes that fork engines load torch
@pytest.mark.usefixtures("ending_servers")
def test_engines_stay_where_others_are_forked_by_another_server(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "num_cores", lambda: 2)  # two engines have fewer threads each than one
    with Session(engines=1, device="cpu") as session:
        session.run("import os\nx = 7")
        monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # as `import sklearn` in the notebook does
        session.resize(2)
        assert session.run("globals().get('x')").values == [7, None]
        with pytest.raises(CellError, match="exit code 3"):
            session.run("os._exit(3)", ranks=[0])
        session.run("x = 8", ranks=[1])
        assert session.run("globals().get('x')").values == [None, 8]
        servers = [each for each in fork_server._servers if session._pool._processes in each.users]
        assert len(servers) == 1, "the other one has no engines any more"


def test_a_server_is_shared_where_libraries_load_alike():
    alike = fork_server.load_environment
    assert alike({"OMP_NUM_THREADS": "1", "HOME": "/a"}) == alike({"OMP_NUM_THREADS": "1", "HOME": "/b"})
    assert alike({"OMP_NUM_THREADS": "1"}) != alike({"OMP_NUM_THREADS": "2"})
    assert alike({"LD_LIBRARY_PATH": "/a"}) != alike({}) != alike({"PYTHONPATH": "/a"})


def test_engines_that_do_not_come_in_time_are_told_with_the_cores(monkeypatch):
    monkeypatch.setattr(launch, "START_TIMEOUT_S", 0)
    before = folders()
    with pytest.raises(
        EngineStartError, match=r"1 of 1 engines \(rank 0\) did not answer within 0 s on \d+ cores?: start"
    ):
        Session(engines=1, device="cpu")
    assert folders() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"engines": 0}, "1 or more engines"), ({"engines": "two"}, "1 or more"), ({"device": "tpu"}, "'auto', 'cpu' or")],
)
def test_arguments_are_checked_before_anything_starts(arguments, words):
    with pytest.raises(SessionError, match=words):
        Session(**arguments)


def test_a_plain_script_leaves_nothing_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import json
        from workbench.session import Session, current

        def scaled(x):
            return x * factor

        factor = 3
        session = Session(engines=1, device="cpu")
        folder = session._folder
        pids = [str(process) for process in folder.processes()]
        environment = session.run("import os; {k: os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')}")
        print(json.dumps({
            "values": session.run("wb.world_size()").values,
            "call": session.submit(scaled, 7).result(),
            "environment": environment.values[0],
            "pids": pids,
            "folder": str(folder.path),
            "current": current() is session,
        }))
        # no close: the interpreter's exit does it
    """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=WAIT_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["values"] == [1]
    assert facts["call"] == [21]
    assert facts["current"]
    assert (facts["environment"]["RANK"], facts["environment"]["WORLD_SIZE"]) == ("0", "1")
    assert int(facts["environment"]["OMP_NUM_THREADS"]) >= 1
    assert len(facts["pids"]) >= 3  # controller, engine, nanny
    assert not any(ProcessId.parse(process).find() for process in facts["pids"])
    assert not os.path.exists(facts["folder"])


@pytest.mark.slow  # so ends the notebook of test_engines_kernel
def test_nothing_outlives_a_killed_notebook(tmp_path):
    """The parent is killed while rank 0 is stuck in C."""
    script = tmp_path / "notebook.py"
    script.write_text(
        textwrap.dedent("""
        import time
        from workbench.session import Session

        def stuck():
            import hashlib
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 200_000_000)

        session = Session(engines=1, device="cpu")
        session.submit(stuck)
        while not session.status()[0].busy:
            time.sleep(0.05)
        print(session._folder.path, flush=True)
        time.sleep(60)
    """)
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        folder = SessionFolder(Path(parent.stdout.readline().strip()))
        processes = folder.processes()
        assert len(processes) >= 3
        assert all(process.find() for process in processes)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(WAIT_TIMEOUT_S)
        parent.stdout.close()
    wait_until(lambda: not any(process.find() for process in processes))
    wait_until(lambda: not folder.path.exists())


def test_close_is_idempotent_ends_everything_and_is_said_with_what_to_do():
    session = Session(engines=2, device="cpu")  # as most sessions of tests: what forks them is there already
    processes = session._folder.processes()
    panel = Panel(make_model, data(), F.cross_entropy, batch_size=16, steps=6, keep=False, session=session)
    comparison = Comparison(session, Subject.of(make_model, data(), F.cross_entropy, batch_size=16, steps=6))
    view = wb.LiveView(session)

    def doze():
        time.sleep(600)

    call = session.submit(doze)
    wait_until(lambda: session.is_busy and session.status()[0].busy, session.status)
    session.close()
    session.close()
    assert not any(process.find() for process in processes)
    assert not session._folder.path.exists()
    assert session_package.find_current() is not session
    with pytest.raises(CellError, match="The session was closed, or left to another notebook, while ranks 0-1 ran"):
        call.result(timeout=WAIT_TIMEOUT_S)
    with pytest.raises(NotStartedError, match=r"wb\.Session"):
        session.run("1")
    with pytest.raises(SessionError, match=r"is closed.*%workbench start.*run the cell that makes the panel"):
        panel.run()
    with pytest.raises(NotStartedError, match="session that is closed"):
        comparison.start(Strategy("*: model"))
    assert "is closed" in view._hint.value and "wb.LiveView()" in view._hint.value
    assert "is closed" in panel._editor.controls.run.tooltip and panel._editor.controls.run.disabled


@pytest.mark.slow
def test_engines_of_an_ipyparallel_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    (tmp_path / "profile_ours").mkdir(mode=0o700)
    (tmp_path / "profile_ours" / "ipcluster_config.py").write_text(
        "get_config().Cluster.controller_args = ['--IPController.use_threads=True', '--log-level=ERROR']\n"
        "get_config().Cluster.delay = 0\n"
    )
    children_before = set(psutil.Process().children(recursive=True))
    with Session(engines=1, profile="ours", device="cpu") as session:
        assert session.run("wb.rank(), wb.world_size()").values == [(0, 1)]
        assert session.num_engines == 1
        assert launch.KEEP_NO_MESSAGES in psutil.Process(session._pool._processes._cluster.controller.pid).cmdline()
        session.run("model = wb.parallelize(torch.nn.Linear(2, 2), '*: data')", setup=True)
        session.run(f"wb.checkpoint.save({str(tmp_path / 'saved')!r}, model=model)")
        (first,) = session.run("model.weight.to_local().sum().item()").values
        folder = os.getcwd()
        monkeypatch.chdir(tmp_path)
        session.restart()
        assert session.run("import os\nos.getcwd()").values == [folder], "that of the session's start"
        assert dict(session.recover().rows)["model"] == f"checkpoint {tmp_path / 'saved'}"
        assert session.run("model.weight.to_local().sum().item()").values == [first]
    wait_until(lambda: set(psutil.Process().children(recursive=True)) <= children_before)
