"""The ports of a controller: no program gets them by chance, and a controller that cannot listen ends."""

import json
import os
import signal
import socket
import subprocess

import pytest

from tests.timeouts import PROGRAM_TIMEOUT_S
from workbench.session.processes import launch, ports, watchdog
from workbench.session.processes.ports import reserved_ports

pytestmark = pytest.mark.engines


@pytest.fixture
def taken():
    """A port on which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def lowest_chosen():
    """The first port that this system may give to a program that connects somewhere."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        given = probe.getsockname()[1]
    found = [int(each) for each in ports._CHOSEN_BY_SYSTEM.read_text().split()]
    assert found[0] <= given <= found[1]
    return found[0]


def test_ports_are_free_and_none_that_the_system_chooses(taken, monkeypatch):
    with reserved_ports(50) as found:
        assert len(set(found)) == 50 and max(found) < lowest_chosen()
    monkeypatch.setattr(ports.secrets.SystemRandom, "sample", lambda *_: [taken, found[0]])
    with reserved_ports(1) as again:
        assert again == [found[0]]
    with (
        pytest.raises(OSError, match=r"2 ports of 127\.0\.0\.1 were asked for, but only 1 are free"),
        reserved_ports(2),
    ):
        pass


def test_sessions_that_start_at_the_same_time_get_different_ports(monkeypatch):
    """20 of 23,000 each: of a class of 30 that starts together, some would have had one in common."""
    monkeypatch.setattr(ports.secrets.SystemRandom, "sample", lambda _, candidates, count: candidates[:count])
    with reserved_ports(20) as first, reserved_ports(20) as second, socket.socket() as server:
        assert len({*first, *second}) == 40
        server.bind(("127.0.0.1", first[0]))
        server.listen()
    with reserved_ports(1) as after:
        assert after == [first[0]]


def test_a_system_that_chooses_from_all_ports_and_one_that_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setattr(ports, "_CHOSEN_BY_SYSTEM", tmp_path / "range")
    with reserved_ports(9) as found:
        assert max(found) < 49_152
    (tmp_path / "range").write_text("1024\t65535\n")
    with reserved_ports(9) as found:
        assert min(found) >= 10_000


def test_a_controller_listens_on_such_ports_only(session):
    for name in ("client", "engine"):
        path = session._folder.path / "profile" / "security" / f"ipcontroller-{name}.json"
        numbers = [each for value in json.loads(path.read_text()).values() for each in numbers_in(value)]
        assert len(numbers) >= 6 and max(numbers) < lowest_chosen()


def numbers_in(value):
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]


def test_a_controller_that_cannot_listen_for_all_messages_ends(taken, tmp_path):
    """Without its control channel all seems to be well, until an interrupt does not come and ranks are killed."""
    with reserved_ports(20) as (registration, *others):
        pass
    settings = f"c = get_config()\nc.IPController.ports = {[registration, taken, *others]}\n"
    (tmp_path / "ipcontroller_config.py").write_text(settings)
    ended = run("ipyparallel.controller", *launch._CONTROLLER_OPTIONS, f"--profile-dir={tmp_path}")
    assert ended.returncode == -signal.SIGKILL
    assert f"Address already in use (addr='tcp://127.0.0.1:{taken}')" in ended.stderr


def test_processes_that_a_controller_forks_end_with_it(tmp_path):
    """Their output would stay open, and this test would wait for it."""
    (tmp_path / "a_controller.py").write_text(
        "import multiprocessing, os, signal, time\n"
        "def child():\n    multiprocessing.get_context('fork').Process(target=time.sleep, args=[9999]).start()\n"
        "    time.sleep(9999)\n"
        "multiprocessing.get_context('fork').Process(target=child).start()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run("a_controller", PYTHONPATH=f"{tmp_path}:{os.getcwd()}").returncode == -signal.SIGKILL


def run(module, *arguments, **variables):
    """A module under the watch of a controller that nobody owns, until all that hold its output have ended."""
    environment = {name: value for name, value in os.environ.items() if name != watchdog.OWNER} | variables
    command = [*launch.WATCHDOG, module, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)
