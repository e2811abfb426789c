"""Slurm starts a notebook's engines and a script's ranks as docs/many-hosts.md says, and takes them away again."""

import os
import re
import signal
import socket
import threading
import time

import pytest

from tests.cluster.programs import (
    LOOP,
    TRAIN,
    assert_trained,
    blocks,
    environment_of_scripts,
    printed_by_ranks,
    run_cell,
)
from tests.cluster.slurm import NEEDS_SLURM, jobs_of
from tests.timeouts import wait_until
from workbench.errors import CellError
from workbench.session import Session
from workbench.session.processes import launch_profile
from workbench.session.processes.make_profile import slurm_profile

(BATCH_FILE,) = blocks("Slurm: a script", "bash")
pytestmark = NEEDS_SLURM


@pytest.fixture(scope="module", autouse=True)
def jobs(submits_jobs, limited):
    """The job with a minute's limit begins here. test_used_up_time.py sees its end."""


def start(session, endless):
    call = session.submit(run_cell, endless)
    time.sleep(1.0)
    assert not call.done(), call.exception()
    return call


def test_a_notebook_trains_on_two_nodes_and_keeps_control_when_an_engine_or_its_job_ends(slurm, monkeypatch, capsys):
    monkeypatch.setattr(socket, "gethostbyname", {host.name: host.address for host in slurm.hosts}.__getitem__)
    made = slurm_profile("nodes=2 ntasks-per-node=2 cpus-per-task=3 gpus-per-node=2 time=01:00:00 comment='of {n}'")
    with Session(profile=made.name, device="cpu") as session:
        assert "CPUs=12 Tasks=4" in slurm.run("scontrol", "show", "step", f"{jobs_of(session)[0]}.0")
        assert "Comment=of {n} " in slurm.run("scontrol", "show", "job", jobs_of(session)[0])
        by_rank = session.run(f"{TRAIN}\n(socket.gethostname(), losses)").values
        assert_trained(by_rank, ["wbh1", "wbh1", "wbh2", "wbh2"])

        slurm.run("scontrol", "update", "nodename=wbh2", "state=drain", "reason=repair")
        assert session.run("wb.rank()").values == [0, 1, 2, 3]  # what runs on a drained node goes on
        with monkeypatch.context() as patch:
            patch.setattr(launch_profile, "START_TIMEOUT_S", 3.0)  # of engines; a job may wait longer
            patch.setattr(launch_profile, "_ASK_PERIOD_S", 1.0)
            impatient = threading.Timer(10.0, os.kill, (os.getpid(), signal.SIGINT))
            impatient.start()
            with pytest.raises(KeyboardInterrupt):
                Session(profile=made.name, device="cpu")
            impatient.join()
        (waiting,) = set(re.findall(r"Slurm job (\d+) is PENDING \(", capsys.readouterr().err))
        assert slurm.job_state(waiting) == "CANCELLED"
        slurm.run("scontrol", "update", "nodename=wbh2", "state=resume")

        call, began_s = start(session, LOOP), time.monotonic()
        os.kill(session.status()[3].pid, signal.SIGKILL)
        with pytest.raises(CellError, match="rank 3 died"):
            call.result(timeout=60)
        assert time.monotonic() - began_s < 10
        assert session.run("len(losses)", ranks=[0, 1, 2]).values == [5] * 3
        assert session.run("wb.rank()").values == [0, 1, 2, 3]  # in two jobs now

        call, began_s = start(session, "import time\nwhile True: time.sleep(0.05)"), time.monotonic()
        job, other = jobs_of(session)
        slurm.run("scancel", job, other)
        with pytest.raises(CellError, match=f"(?s)Slurm job {job} is CANCELLED.*Slurm job {other} is CANCELLED"):
            call.result(timeout=60)
        assert time.monotonic() - began_s < 10
    assert slurm.job_state(job) == "CANCELLED"


def test_the_batch_file_trains_on_two_nodes(slurm, tmp_path):
    """Unchanged, but for options of the command line that ask for two ranks per node in place of eight."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.sh").write_text(BATCH_FILE)
    smaller = ("--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
    options = ("--parsable", "--output=printed", *smaller)
    job = slurm.run("sbatch", *options, "job.sh", cwd=tmp_path, env=environment_of_scripts())
    wait_until(lambda: slurm.job_state(job) == "COMPLETED", slurm.logs)
    by_rank = printed_by_ranks((tmp_path / "printed").read_text())
    assert_trained(by_rank, ["wbh1", "wbh1", "wbh2", "wbh2"])
