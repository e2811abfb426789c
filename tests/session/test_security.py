"""Who has no key gets nothing: not by the network, not as another user of this machine."""

import contextlib
import json
import os
import stat
import subprocess
import sys
import time

import psutil
import pytest
import zmq
from jupyter_client.session import Session as MessageSession

from tests.timeouts import WAIT_TIMEOUT_S

pytestmark = pytest.mark.engines
NOBODY = 65534


def processes(session):
    """The controller, the engines and their nannies."""
    pids = [known.pid for known in session._folder.processes()]
    found = {psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)}
    return found | {child for process in list(found) for child in process.children(recursive=True)}


def listening(session):
    return {c.laddr for process in processes(session) for c in process.net_connections() if c.status == "LISTEN"}


def connection(session, name="client"):
    return json.loads((session._folder.path / "profile" / "security" / f"ipcontroller-{name}.json").read_text())


def test_everything_listens_on_loopback(session):
    assert len(listening(session)) > 10
    assert {place.ip for place in listening(session)} == {"127.0.0.1"}


def test_the_folder_and_its_keys_are_the_users_alone(session):
    folder = session._folder.path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = list((folder / "profile" / "security").iterdir())
    assert len(keys) == 2
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert all(connection(session)[name] for name in ("key", "curve_serverkey"))


def intrude(session, until=lambda answers: False, for_s=2.5, **socket_options):
    """A well-formed request to run code, sent to every port of the controller without the signing key; the answers
    until there are such, or for so long.
    """
    message = MessageSession(key=b"a guess")
    request = message.serialize(message.msg("execute_request", {"code": "intruded = True", "silent": False}))
    context, answers = zmq.Context(), []
    try:
        sockets = []
        for place in listening(session):
            for kind in (zmq.DEALER, zmq.SUB):
                socket = context.socket(kind)
                socket.linger = 0
                for name, value in socket_options.items():
                    setattr(socket, name, value)
                if kind == zmq.SUB:
                    socket.subscribe(b"")
                socket.connect(f"tcp://{place.ip}:{place.port}")
                sockets.append(socket)
                if kind == zmq.DEALER:
                    with contextlib.suppress(zmq.Again):  # who speaks another protocol (gloo, a debugger) hangs up
                        for rank in range(session.num_engines):
                            socket.send_multipart([str(rank).encode(), *request], zmq.NOBLOCK)
        deadline_s = time.monotonic() + for_s
        while time.monotonic() < deadline_s and not until(answers):
            session.run("print('something to overhear')\nsecret = 42")
            time.sleep(0.2)  # they connect meanwhile
            answers += [socket.recv_multipart() for socket in sockets if socket.poll(0)]
    finally:
        context.destroy(linger=0)
    return answers


def is_overheard(answers):
    return any(b"overhear" in part for answer in answers for part in answer)


def test_without_a_key_no_code_runs_and_nothing_is_overheard(session):
    assert intrude(session) == []
    assert session.run("'intruded' in globals()").values == [False] * session.num_engines


def test_the_attempt_itself_works(session):
    """With the encryption key of the connection file one overhears, but still runs nothing: requests are signed."""
    public, secret = zmq.curve_keypair()
    known = connection(session)["curve_serverkey"].encode()
    options = {"curve_serverkey": known, "curve_publickey": public, "curve_secretkey": secret}
    assert is_overheard(intrude(session, is_overheard, WAIT_TIMEOUT_S, **options))
    assert session.run("'intruded' in globals()").values == [False] * session.num_engines


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_can_neither_read_keys_nor_join_the_world_nor_read_tensors(session):
    segments = session.run(
        "import os\n"
        "kept = wb.ones(1000, placement=wb.placement('cpu', ranks=[0, 1]), sbp=wb.sbp.broadcast)\n"
        "[f'/proc/{os.getpid()}/mem', *(f'/proc/{os.getpid()}/fd/{n}' for n in os.listdir('/proc/self/fd'))]"
    ).values
    wanted = [
        str(session._folder.path / "profile" / "security" / "ipcontroller-client.json"),
        str(session._folder.path / "session.json"),
        session._folder.new_store().removeprefix("file://"),
        *(path for paths in segments for path in paths),
    ]
    program = (
        "import os, sys\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "for path in sys.argv[1:]:\n"
        "    for mode in ('rb', 'ab'):\n"
        "        try:\n"
        "            open(path, mode)\n"
        "        except OSError:\n"
        "            continue\n"
        "        print('opened', path, mode)\n"
        "print('tried', len(sys.argv) - 1)\n"
    )
    tried = subprocess.run([sys.executable, "-c", program, *wanted], capture_output=True, text=True, check=True)
    assert tried.stdout == f"tried {len(wanted)}\n", tried.stdout
    names = [name for name in os.listdir("/dev/shm") if os.stat(f"/dev/shm/{name}").st_mode & 0o077]
    assert not [name for name in names if "workbench" in name]
