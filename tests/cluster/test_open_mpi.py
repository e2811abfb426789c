"""Open MPI starts a notebook's engines and a script's ranks on two hosts, as docs/many-hosts.md says."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster import programs
from tests.session import hosts
from tests.timeouts import PROGRAM_TIMEOUT_S
from workbench.errors import CellError
from workbench.session import Session

LAUNCHER, ENGINES = programs.blocks("MPI: notebooks", "python")
ON_ONE_HOST, ON_HOSTS = re.findall(r"^    mpirun (.*)$", programs.section("MPI: a script"), re.MULTILINE)
WHY_NOT = hosts.missing() or ("" if shutil.which("mpirun") else "needs mpirun (Debian: openmpi-bin)")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "can be made"),
]


@pytest.fixture
def folder(network, tmp_path, monkeypatch):
    """A folder with the file of hosts, and an environment in which mpirun reaches them."""
    (tmp_path / "hosts").write_text("".join(f"{host.address} slots=2\n" for host in network.hosts))
    reach = {"OMPI_MCA_plm_rsh_agent": f"ssh -F {network.folder}/ssh_config"}
    reach |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    for name, value in {**programs.environment_of_scripts(), **reach, "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_notebook_trains_on_two_hosts_and_keeps_control_when_an_engine_is_lost(folder):
    profile = folder / "profile_cluster"
    profile.mkdir(mode=0o700)
    (profile / "ipcluster_config.py").write_text(
        LAUNCHER.replace('"hosts"', repr(str(folder / "hosts"))) + programs.lines_of_ssh()
    )
    (profile / "ipengine_config.py").write_text(ENGINES)
    with Session(engines=4, profile="cluster", device="cpu") as session:
        by_rank = session.run(f"{programs.TRAIN}\n(socket.gethostname(), losses)").values
        programs.assert_trained(by_rank, ["wbh1", "wbh1", "wbh2", "wbh2"])
        call = session.submit(programs.run_cell, programs.LOOP)
        time.sleep(1.0)
        assert not call.done(), call.exception()
        began_s = time.monotonic()
        os.kill(session.status()[3].pid, signal.SIGKILL)
        with pytest.raises(CellError, match="rank 3 died"):
            call.result(timeout=60)
        assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("options", [ON_ONE_HOST, ON_HOSTS], ids=["one host", "two hosts"])
def test_a_script_trains(folder, options):
    (folder / "train.py").write_text(programs.TRAIN)
    is_alone = options == ON_ONE_HOST
    command = ["mpirun", *options.replace("-n 16", "-n 4").replace("python", sys.executable).split()]
    done = subprocess.run(
        [*command[:1], *(["--oversubscribe"] if is_alone else []), *command[1:]],
        capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    by_rank = programs.printed_by_ranks(done.stdout)
    programs.assert_trained(by_rank, [os.uname().nodename] * 4 if is_alone else ["wbh1", "wbh1", "wbh2", "wbh2"])
