"""Slurm on hosts of network namespaces: munged, slurmctld, and a slurmd per host, with a configuration of our own."""

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.session import hosts
from tests.session.hosts import NETWORK
from tests.timeouts import wait_until

_CONFIG = """
ClusterName=workbench
SlurmctldHost={name}({network}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu
ReturnToService=2
KillWait=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
NodeName={hosts} NodeAddr={addresses} CPUs=256 RealMemory=1000 Gres=gpu:16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """The programs that are not installed, with Debian's packages; empty if none."""
    programs = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "squeue") if shutil.which(name) is None]
    return f"needs {', '.join(programs)} (Debian: slurm-wlm, munge)" if programs else ""


WHY_NOT = hosts.missing() or missing()
NEEDS_SLURM = [
    pytest.mark.cluster,
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "can be made"),
]


class Slurm:
    """The programs of a cluster, as a context. ``environment`` makes Slurm's commands find it."""

    def __init__(self, network):
        self.hosts = network.hosts
        self.folder = Path(tempfile.mkdtemp(prefix="wb-slurm-"))  # short: the path of a socket has 107 characters
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._programs = []

    def __enter__(self):
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_all(self):
        self.folder.chmod(0o755)
        for name in ("state", *(f"spool-{host.name}" for host in self.hosts)):
            (self.folder / name).mkdir()
        names = ",".join(host.name for host in self.hosts)
        addresses = ",".join(host.address for host in self.hosts)
        settings = {"folder": self.folder, "name": socket.gethostname(), "network": NETWORK}
        (self.folder / "slurm.conf").write_text(_CONFIG.format(hosts=names, addresses=addresses, **settings))
        for number in range(16):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File={self.folder}/gpu[0-15]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # else it looks for a kind, and finds none
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{end}" for option, end in files.items()]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *options)
        wait_until((self.folder / "munge.socket").exists, self.logs)
        self._start("slurmctld", "-D")
        for host in self.hosts:
            self._start("slurmd", "-D", host=host)
        wait_until(self._is_ready, self.logs)

    def __exit__(self, *exc_info):
        for program in reversed(self._programs):
            program.terminate()
        for program in self._programs:
            try:
                program.wait(10)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command, **options):
        """The output of one of Slurm's commands."""
        environment = {**os.environ, **self.environment, **options.pop("env", {})}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job_state(self, job):
        """Such as RUNNING, CANCELLED."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")

    def logs(self):
        """The ends of all logs, for a failure."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def _start(self, *command, host=None):
        environment = {**os.environ, **self.environment}
        output = (self.folder / f"{command[0]}-output.log").open("ab")
        options = {"env": environment, "stdout": output, "stderr": output, "cwd": self.folder}
        with output:
            self._programs.append(
                subprocess.Popen(command, **options) if host is None else host.spawn(*command, **options)
            )

    def _is_ready(self):
        asked = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            capture_output=True, text=True, env={**os.environ, **self.environment}, check=False,
        )  # fmt: skip
        return asked.stdout.split() == ["idle"] * len(self.hosts)


def jobs_of(session):
    """The jobs of its engines."""
    return [engines.job_id for engines in session._pool._processes._cluster.engines.values()]
