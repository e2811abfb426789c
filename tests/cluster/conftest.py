"""Two hosts, and Slurm on them, for all files of this folder."""

import pytest

from tests.cluster.slurm import Slurm
from tests.session import hosts


@pytest.fixture(scope="session")
def network(tmp_path_factory):
    with hosts.Network(tmp_path_factory.mktemp("hosts"), 2) as network:
        yield network


@pytest.fixture(scope="session")
def slurm(network):
    with Slurm(network) as slurm:
        yield slurm
