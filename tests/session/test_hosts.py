"""A session over several hosts, started by SSH with the profile of the docs: exchanges, a cut link, a lost host."""

import re
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.session import hosts
from workbench.errors import CellError, SessionError
from workbench.session import Session

PAGE = (Path(__file__).parents[2] / "docs" / "many-hosts.md").read_text()
WHY_NOT = hosts.missing()

WAIT_FOR_ALL = """
p = wb.placement("cpu", ranks=[0, 1, 2])
x = wb.ones(3, 4, placement=p, sbp=wb.sbp.split(0))
kept = 41 + wb.rank()
while True:
    x.to_global(sbp=wb.sbp.broadcast)
"""


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL).group(1)


def test_the_batch_file_is_a_shell_script():
    subprocess.run(["bash", "-n"], input=block("bash"), text=True, check=True)
    assert "#SBATCH --nodes=2" in block("bash")


def test_the_manifest_is_a_service_and_a_job():
    service, job = yaml.safe_load_all(block("yaml"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]["template"]["spec"]
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == {v["name"] for v in spec["volumes"]}


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with hosts.Network(tmp_path_factory.mktemp("hosts"), 2) as network:
        yield network


@pytest.fixture
def session(network, tmp_path, monkeypatch):
    """Two ranks on the first host and one on the second."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    network.profile(block("python"), tmp_path, {1: 2, 2: 1})
    with Session(engines=3, profile="cluster", device="cpu") as session:
        yield session
    for host in network.hosts:
        host.mend_cable()


on_hosts = [
    pytest.mark.engines,
    pytest.mark.timed,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "can be made"),
    # ipyparallel's threads that wait for an engine by ssh end with an exception when its host goes
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def each(*marks):
    def apply(function):
        for mark in marks:
            function = mark(function)
        return function

    return apply


@each(*on_hosts)
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


@each(*on_hosts)
@pytest.mark.parametrize("fault", ["cut link", "lost host"])
def test_a_fault_between_hosts_ends_the_cell_and_what_is_left_can_be_saved(session, network, fault):
    host = network.hosts[1]
    call = session.submit(_run_cell, WAIT_FOR_ALL)
    time.sleep(2.0)
    assert not call.done(), call.exception()
    began = time.monotonic()
    host.cut_cable() if fault == "cut link" else host.kill()
    with pytest.raises(CellError) as caught:
        call.result(timeout=60)
    assert time.monotonic() - began < 15
    lost = next(rank for rank in range(3) if f"rank {rank}" in str(caught.value) and rank not in session._live().ids())
    left = [rank for rank in range(3) if rank != lost]
    assert session.run("kept", ranks=left).values == [41 + rank for rank in left]
    with pytest.raises(SessionError, match=r"started only all together.*Save what the other ranks hold"):
        session.run("1")


def _run_cell(code):
    """As a cell does, in the engine's names."""
    from workbench.session import engine

    exec(code, engine.shell().user_ns)
