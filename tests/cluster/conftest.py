"""Two hosts, Slurm on them, and a job of which the time is up after a minute, for all files of this folder."""

from contextlib import contextmanager

import pytest

from tests.cluster.programs import LOOP, blocks, environment_of_scripts, lines_of_ssh, run_cell
from tests.cluster.slurm import Slurm
from tests.session import hosts
from workbench.session import Session


@pytest.fixture(scope="session")
def network(tmp_path_factory):
    with hosts.Network(tmp_path_factory.mktemp("hosts"), 2) as network:
        yield network


@pytest.fixture(scope="session")
def slurm(network):
    with Slurm(network) as slurm:
        yield slurm


@pytest.fixture(scope="session")
def profiles(tmp_path_factory):
    """A folder of profiles: one of Slurm as on the page of many hosts, with two engines per node."""
    folder = tmp_path_factory.mktemp("ipython")
    profile = folder / "profile_limited"
    profile.mkdir(mode=0o700)
    (launcher,) = blocks("Slurm: notebooks", "python")
    launcher = launcher.replace("--ntasks-per-node=8", "--ntasks-per-node=2").replace("08:00:00", "00:01:00")
    (profile / "ipcluster_config.py").write_text(launcher + lines_of_ssh())
    return folder


@contextmanager
def notebook(slurm, folder):
    """The environment of a notebook on a machine that submits jobs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment_of_scripts(), **slurm.environment, "IPYTHONDIR": str(folder)}.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        yield


@pytest.fixture(scope="module")
def submits_jobs(slurm, profiles):
    with notebook(slurm, profiles):
        yield


@pytest.fixture(scope="session")
def limited(slurm, profiles):
    """A session, and its cell that runs until the minute of its job is over, while other tests run."""
    with notebook(slurm, profiles):
        session = Session(engines=2, profile="limited", device="cpu")
    yield session, session.submit(run_cell, LOOP)
    with notebook(slurm, profiles):
        session.close()
