"""Ranks started by torchrun and Open MPI: their numbers and their rendezvous."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.timeouts import PROGRAM_TIMEOUT_S
from workbench.errors import WorldError
from workbench.transport import launchers

PROGRAM = """
import workbench as wb
wb.init()
x = wb.ones(4, 2, placement=wb.placement.all("cpu"), sbp=wb.sbp.split(0))
print(f"rank {wb.rank()} of {wb.world_size()} {x.sum().full_tensor().item()}\\n", end="", flush=True)
"""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in (*os.environ, "RANK"):
        if name.startswith(("OMPI_", "PMIX_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
            monkeypatch.delenv(name, raising=False)


def as_mpirun(monkeypatch, rank, size, local_rank, local_size, folder):
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    for name, value in values.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(folder))


def test_without_a_launcher_a_process_is_alone():
    assert (launchers.launcher_value("rank", 0), launchers.launcher_value("world_size", 1)) == (0, 1)
    assert launchers.default_init_method() == "env://"


def test_open_mpi_sets_rank_and_local_rank(monkeypatch, tmp_path):
    as_mpirun(monkeypatch, 3, 4, 1, 2, tmp_path)
    assert [launchers.launcher_value(what, -1) for what in ("rank", "world_size", "local_rank")] == [3, 4, 1]


def test_ranks_of_one_host_meet_in_the_jobs_folder(monkeypatch, tmp_path):
    as_mpirun(monkeypatch, 0, 2, 0, 2, tmp_path)
    assert launchers.default_init_method() == (tmp_path / "workbench-rendezvous").as_uri()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert launchers.default_init_method() == "env://"


def test_ranks_of_several_hosts_need_an_address(monkeypatch, tmp_path):
    as_mpirun(monkeypatch, 0, 4, 0, 2, tmp_path)
    with pytest.raises(WorldError, match=r"4 ranks, 2 of them on this host.*-x MASTER_ADDR"):
        launchers.default_init_method()


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (Debian's package openmpi-bin)")
def test_a_script_under_mpirun(tmp_path):
    """The script of the readme, which another test runs under torchrun."""
    (tmp_path / "program.py").write_text(PROGRAM)
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *as_root, "--oversubscribe", "-n", "2", sys.executable, str(tmp_path / "program.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert sorted(lines) == ["rank 0 of 2 8.0", "rank 1 of 2 8.0"]
