"""A session over several hosts, started by SSH: exchanges, lost engines and hosts, one line that starts it."""

import os
import re
import signal
import time
from argparse import Namespace

import pytest

from tests.cluster.programs import blocks, run_cell
from tests.session import hosts
from tests.timeouts import wait_until
from workbench import cli
from workbench.core.cores import num_cores
from workbench.errors import CellError, SessionError
from workbench.session import Session, cluster, magic_commands

WHY_NOT = hosts.missing()

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timed,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "can be made"),
]

WAIT_FOR_ALL = """
p = wb.placement("cpu", ranks=[0, 1, 2])
x = wb.ones(3, 4, placement=p, sbp=wb.sbp.split(0))
kept = 41 + wb.rank()
while True:
    x.to_global(sbp=wb.sbp.broadcast)
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with hosts.Network(tmp_path_factory.mktemp("hosts"), 2) as network:
        yield network


@pytest.fixture
def session(network, tmp_path, monkeypatch):
    """Two ranks on the first host and one on the second."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    network.profile(blocks("SSH", "python")[0], tmp_path, {1: 2, 2: 1})
    with Session(engines=3, profile="cluster", device="cpu") as session:
        yield session
    for host in network.hosts:
        host.mend_cable()


def test_ranks_exchange_by_memory_inside_a_host_and_by_its_interface_between(session):
    names = session.run("import socket, os; (socket.gethostname(), os.environ['GLOO_SOCKET_IFNAME'])").values
    assert sorted(names) == [("wbh1", "eth0"), ("wbh1", "eth0"), ("wbh2", "eth0")]
    groups = session.status()[0].transport_groups
    assert any("shared" in line for line in groups) and any("gloo" in line for line in groups)
    same = session.run(
        "p = wb.placement('cpu', ranks=[0, 1, 2])\n"
        "x = wb.randn(7, 5, placement=p, sbp=wb.sbp.split(0))\n"
        "y = x.to_global(sbp=wb.sbp.split(1)).to_global(sbp=wb.sbp.broadcast)\n"
        "bool((y.to_local() == x.full_tensor()).all())"
    )
    assert same.values == [True] * 3
    listening = session.run(
        "import psutil\nsorted({c.laddr.ip for c in psutil.Process().net_connections() if c.status == 'LISTEN'})"
    )
    assert not any(set(addresses) & {"0.0.0.0", "::"} for addresses in listening.values), listening.values


HOSTS = "import os, socket\n(socket.gethostname(), os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])"
TWO_HOSTS = [("wbh1", "0", "2"), ("wbh1", "1", "2"), ("wbh2", "0", "1")]
ONE_HOST = [("wbh1", "0", "3"), ("wbh1", "1", "3"), ("wbh1", "2", "3")]


def test_lost_engines_are_replaced_and_hosts_too(session, network, capfd):
    """An engine dies; a link is cut, and mended; a host disappears. The other ranks keep their variables."""
    second = network.hosts[1]
    assert session.run(HOSTS).values == TWO_HOSTS
    session.run("kept = 41 + wb.rank()")
    (pid,) = session.run("import os\nos.getpid()", ranks=[1]).values
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: session._pool.live.registered() == [0, 2], "the death of rank 1")
    assert session.run("kept", ranks=[0, 2]).values == [41, 43], "no new engine is needed for it"
    assert session.run(HOSTS).values == TWO_HOSTS
    assert "rank 1 died (its process on wbh1 has ended" in capfd.readouterr().err

    for fault in (second.cut_cable, second.kill):
        session.run("kept = 41 + wb.rank()")
        call = session.submit(run_cell, WAIT_FOR_ALL)
        time.sleep(2.0)
        assert not call.done(), call.exception()
        began_s = time.monotonic()
        fault()
        with pytest.raises(CellError, match=r"rank 2 died|lost rank 2"):
            call.result(timeout=60)
        assert time.monotonic() - began_s < 15
        assert session.run("kept", ranks=[0, 1]).values == [41, 42]
        began_s = time.monotonic()
        assert session.run(HOSTS).values == ONE_HOST
        took_s = time.monotonic() - began_s
        assert took_s < 20
        assert session.run("kept", ranks=[0, 1]).values == [41, 42] and sums_are_right(session)
        assert "10.77.0.12: " in (said := capfd.readouterr().err) and "elsewhere: 1 on root@10.77.0.11" in said
        second.mend_cable() if fault == second.cut_cable else second.serve()
        network.wait_for(second)
        session.resize(2)
        session.resize(3)
        assert session.run(HOSTS).values == TWO_HOSTS, "the added engine is where the profile has place"


def test_one_line_starts_engines_on_hosts(network, tmp_path, monkeypatch, no_session, capsys):
    """The profile is written, and the hosts are asked first. All that is wrong is in one message."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{network.ssh_program()}:{os.environ['PATH']}")
    first, second = (f"root@{host.address}" for host in network.hosts)
    with pytest.raises(SessionError) as caught:
        magic_commands.start(options(hosts=f"{first},nobody@{network.hosts[1].address},root@10.77.0.99", engines=3))
    assert "Permission denied" in str(caught.value) and "ssh-copy-id nobody@10.77.0.12" in str(caught.value)
    assert re.search(r"10\.77\.0\.99: ssh: .*(timed out|No route)", str(caught.value)) and "doctor --hosts" in str(
        caught.value
    )
    with pytest.raises(SessionError, match=r"no Python at /opt/none.*--python PATH"):
        magic_commands.start(options(hosts=second, python="/opt/none/bin/python"))
    assert cli.main(["doctor", "--hosts", f"{first},{second}"]) == 0
    found = capsys.readouterr().out
    assert "ssh reaches wbh1" in found and "eth0" in found and re.search(r"gloo adds 1 MB over 2 hosts in", found), (
        found
    )

    magic_commands.start(options(hosts=f"{first},{second}", engines=3))
    said = capsys.readouterr().out
    assert "2 on root@10.77.0.11, 1 on root@10.77.0.12" in said and "listens on 10.77.0.1" in said
    assert str(tmp_path / "profile_workbench-10-77-0-11-10-77-0-12") in said
    with cluster.current() as session:
        assert session.run(HOSTS).values == TWO_HOSTS and sums_are_right(session)
        assert session.run("torch.get_num_threads()").values[2] == num_cores()
        began_s = time.monotonic()
    took_s = time.monotonic() - began_s
    for host in network.hosts:
        wait_until(lambda host=host: len(host.processes()) == 1, "the end of all but sshd")
    assert not list(tmp_path.glob("profile_*/log/ipengine*.out"))
    assert "could not end" not in capsys.readouterr().err and took_s < 15


def sums_are_right(session):
    """Whether all ranks exchange."""
    code = "x = wb.ones(6, placement=wb.placement.all('cpu'), sbp='S(0)')\nx.full_tensor().sum().item()"
    return session.run(code).values == [6.0] * session.num_engines


def options(**given):
    """Those of ``%workbench start``."""
    defaults = dict.fromkeys(("engines", "profile", "hosts", "slurm", "python"))
    return Namespace(**defaults | {"device": "cpu", "keep": False, "new": True} | given)
