"""Where ranks of several hosts meet: one interface, one address, nothing that listens elsewhere."""

import datetime
import os
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.timeouts import WAIT_TIMEOUT_S
from workbench.errors import EngineStartError, WorldError
from workbench.session.processes import ports
from workbench.session.processes.folder import SessionFolder
from workbench.session.processes.ports import reserved_ports
from workbench.session.processes.rendezvous_address import (
    INTERFACE_VARIABLES,
    RendezvousAddress,
    address_of,
    address_towards,
    find_rendezvous_address,
    interface_of,
    rendezvous_store,
)
from workbench.transport import rendezvous


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_ranks_of_this_host_meet_in_a_file_others_at_the_address_of_rank_0(tmp_path):
    folder, here = SessionFolder(tmp_path), rendezvous.host_name()
    near, far = RendezvousAddress(here, "10.0.0.1", "eth0", 1), RendezvousAddress("node1", "10.0.0.2", "eth0", 1234)
    assert rendezvous_store([near, near], folder).startswith("file://")
    assert rendezvous_store([far, near], folder) == "tcp://10.0.0.2:1234"


def test_the_interface_is_the_one_that_leads_to_the_controller():
    point = find_rendezvous_address("127.0.0.1")
    assert (point.address, point.interface) == ("127.0.0.1", "lo")
    assert [os.environ[name] for name in INTERFACE_VARIABLES] == ["lo", "lo"]
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("203.0.113.77") == ""
    lowest_chosen, _ = ports._CHOSEN_BY_SYSTEM.read_text().split()
    assert point.port < int(lowest_chosen)  # until rank 0 listens, no program gets it by chance


def test_an_interface_that_the_user_has_chosen_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert find_rendezvous_address("127.0.0.2").interface == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_an_interface_that_is_not_there_is_an_error_that_lists_those_that_are():
    with pytest.raises(EngineStartError, match=r"GLOO_SOCKET_IFNAME=ib7: .* It has .*lo.* Name one of them"):
        address_of("ib7")


@pytest.mark.parametrize(("address", "written"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_store_listens_at_its_address_and_nowhere_else(address, written):
    timeout = datetime.timedelta(seconds=WAIT_TIMEOUT_S)
    if address not in {each.address for found in psutil.net_if_addrs().values() for each in found}:
        pytest.skip("this machine has no IPv6")
    with reserved_ports(1) as [port], ThreadPoolExecutor(2) as pool:
        place = f"tcp://{written}:{port}"
        stores = list(pool.map(lambda rank: rendezvous._tcp_store(place, rank, 2, timeout), range(2)))
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    listening = [
        c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port
    ]
    assert listening == [address]


@pytest.mark.parametrize("place", ["tcp://127.0.0.1", "tcp://:29500"])
def test_a_store_without_address_or_port_is_an_error(place):
    with pytest.raises(WorldError, match="needs an address of rank 0's host and a free port"):
        rendezvous._tcp_store(place, 0, 2, datetime.timedelta(seconds=1))
