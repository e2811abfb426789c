"""Hosts made of network namespaces: each has an address of its own, a host name, and an sshd that lets us in."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.timeouts import wait_until

NETWORK = "10.77.0"


def missing():
    """Why such hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    programs = [name for name in ("ip", "ssh", "ssh-keygen", "unshare") if shutil.which(name) is None]
    programs += [] if Path("/usr/sbin/sshd").exists() else ["sshd"]
    if programs:
        return f"needs {', '.join(programs)} (Debian: iproute2, openssh-server, openssh-client)"
    tried = _run("ip", "link", "add", "wbtry0", "type", "bridge", check=False)
    _run("ip", "link", "del", "wbtry0", check=False)
    return "" if tried.returncode == 0 else f"this kernel makes no bridges: {tried.stderr.strip()}"


@dataclass
class Host:
    """One of them, by number from 1."""

    number: int
    folder: Path
    sshd: subprocess.Popen | None = None

    @property
    def name(self):
        return f"wbh{self.number}"

    @property
    def _names(self):
        return Path("/etc/netns") / self.name

    @property
    def address(self):
        return f"{NETWORK}.{10 + self.number}"

    def start(self):
        """Cable and address, and sshd under a host name of its own."""
        cable = f"wbv{self.number}"
        self._names.mkdir(parents=True, exist_ok=True)  # what /etc/hosts holds in this namespace
        names = (f"{NETWORK}.{10 + number} wbh{number} workbench-{number - 1}.workbench\n" for number in range(1, 10))
        (self._names / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _run("ip", "link", "set", cable, "master", "wbbr0", "up")
        _run("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            _run("ip", "-n", self.name, "link", "set", link, "up")
        self.serve()

    def serve(self):
        """Let its sshd run, also when it comes back after `kill`."""
        config = self.folder / f"sshd{self.number}.conf"
        config.write_text(
            f"Port 22\nListenAddress {self.address}\nHostKey {self.folder}/host_key\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {self.folder}/key.pub\nUsePAM no\nPasswordAuthentication no\n"
            f"PermitRootLogin prohibit-password\n"
            f"SetEnv PYTHONPATH={Path(__file__).parents[2]}\n"  # this checkout, wherever workbench is installed from
        )
        self.sshd = self.spawn("/usr/sbin/sshd", "-D", "-E", f"{self.folder}/sshd{self.number}.log", "-f", str(config))

    def spawn(self, *command, **options):
        """Start a program on it."""
        under_its_name = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        return subprocess.Popen(["ip", "netns", "exec", self.name, *under_its_name, *command], **options)

    def cut_cable(self):
        _run("ip", "link", "set", f"wbv{self.number}", "down")

    def mend_cable(self):
        _run("ip", "link", "set", f"wbv{self.number}", "up")

    def processes(self):
        """All that runs on it."""
        pids = _run("ip", "netns", "pids", self.name, check=False).stdout.split()
        return [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]

    def kill(self):
        """Everything on it ends at once, as when its power goes."""
        for process in self.processes():
            process.kill()
        if self.sshd is not None:
            self.sshd.wait()

    def remove(self):
        self.kill()
        _run("ip", "netns", "del", self.name, check=False)
        shutil.rmtree(self._names, ignore_errors=True)


class Network:
    """Some hosts on one bridge with this machine, and an ssh configuration for them. There is one at a time."""

    def __init__(self, folder: Path, num_hosts: int) -> None:
        self.folder = folder
        self.hosts = [Host(number, folder) for number in range(1, num_hosts + 1)]

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self):
        self._lock = (Path(tempfile.gettempdir()) / "workbench-test-network.lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # names and addresses are those of the machine
        self._remove()  # what a run that was killed has left
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        (self.folder / "ssh_config").write_text(
            f"Host {NETWORK}.*\n  IdentityFile {self.folder}/key\n  StrictHostKeyChecking no\n"
            f"  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        _run("ip", "link", "add", "wbbr0", "type", "bridge")
        _run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", "wbbr0")
        _run("ip", "link", "set", "wbbr0", "up")
        for host in self.hosts:
            host.start()
        for host in self.hosts:
            self.wait_for(host)

    def __exit__(self, *exc_info):
        self._remove()
        self._lock.close()

    def _remove(self):
        for host in self.hosts:
            host.remove()
        _run("ip", "link", "del", "wbbr0", check=False)

    def ssh(self, host, command):
        return _run("ssh", "-F", str(self.folder / "ssh_config"), f"root@{host.address}", command, check=False)

    def wait_for(self, host):
        wait_until(lambda: self.ssh(host, "hostname").returncode == 0, lambda: self.ssh(host, "hostname").stderr)
        assert self.ssh(host, "hostname").stdout.strip() == host.name

    def ssh_program(self):
        """An ``ssh`` that takes our key, for programs that call it by its name: a folder for PATH."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        (folder / "ssh").chmod(0o755)
        return folder

    def profile(self, documented: str, ipython_dir: Path, engines: dict[int, int]) -> None:
        """The documented profile, with these hosts, this Python, and our keys."""
        own = {f"root@{self.hosts[number - 1].address}": count for number, count in engines.items()}
        settings = {
            "SSHEngineSetLauncher.engines": own,
            "SSHLauncher.remote_python": sys.executable,
            "SSHLauncher.ssh_args": ["-F", str(self.folder / "ssh_config")],
        }
        folder = ipython_dir / "profile_cluster"
        folder.mkdir(mode=0o700, parents=True)
        lines = [documented, *(f"c.{name} = {value!r}" for name, value in settings.items())]
        (folder / "ipcluster_config.py").write_text("\n".join(lines))


def _run(*command, check=True):
    return subprocess.run(command, capture_output=True, text=True, check=check)
