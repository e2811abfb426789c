"""Writes ipyparallel profiles for engines on other hosts: over SSH, or by Slurm."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from workbench.core.suggest import suggest
from workbench.errors import SessionError
from workbench.session.processes.gpus import check_num_engines
from workbench.session.processes.host_facts import PACKAGES, HostFacts, ask_hosts, parse_hosts
from workbench.session.processes.rendezvous_address import address_towards
from workbench.units import counted

_COMMON = """\
c.Cluster.delay = 0
c.Cluster.controller_args = [
    "--IPController.use_threads=True",
    "--IPController.enable_curve=True",  # encrypted; only processes with the key can join
    "--HeartMonitor.period=1000",  # a lost host is noticed in 6 seconds
    "--HeartMonitor.max_heartmonitor_misses=6",
]
c.EngineLauncher.engine_args = ["--IPEngine.max_heartbeat_misses=8", "--IPEngine.timeout=60", "--log-level=ERROR"]
"""
_SBATCH = {
    "account", "begin", "comment", "constraint", "cpus-per-gpu", "cpus-per-task", "deadline", "exclude", "exclusive",
    "gpus-per-node", "gres", "licenses", "mem", "mem-per-cpu", "mem-per-gpu", "nice", "nodelist", "nodes",
    "ntasks-per-node", "partition", "priority", "qos", "reservation", "switches", "time", "tmp",
}  # fmt: skip
_FLAGS = {"exclusive"}
_OF_EACH_JOB = ("nodes", "ntasks-per-node", "gpus-per-node")
"""What a job asks for by its number of engines."""
_LONGEST_NAME = 40
_NUMBERS = ("nodes", "ntasks-per-node", "cpus-per-task")


@dataclass(frozen=True, slots=True)
class MadeProfile:
    """A profile that was written: its name, its file, its number of engines; and what it does, in lines."""

    name: str
    path: Path
    num_engines: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        again = f"Again: %workbench start --profile {self.name}"
        return "\n".join(
            [f"workbench: wrote profile {self.name}: {self.path}", *(f"  {each}" for each in self.lines), f"  {again}"]
        )


def ssh_profile(
    text: str, engines: int | None = None, python: str = "", command: Sequence[str] = ("ssh",)
) -> MadeProfile:
    """A profile for engines over SSH, after the hosts were asked whether they can run some.

    Args:
        text: the hosts, ``"a,me@b,c:2222"``.
        engines: spread evenly; default: one for each GPU, or 2 on each host.
        python: the interpreter on the hosts; default: the path of the one here.
        command: ssh with its options, which also go into the profile.

    Raises:
        SessionError: some hosts cannot run engines. It names each with the fix.
    """
    asked = f"%workbench start --hosts {text}"
    hosts = parse_hosts(text, asked)
    if engines is not None:
        check_num_engines(engines, f"{asked} --engines {engines}")
    found = ask_hosts(hosts, python, command)
    problems = [line for facts in found for line in _problems(facts)]
    addresses = Counter(facts.here for facts in found if facts.here)
    if len(addresses) > 1:
        seen = ", ".join(f"{facts.host} sees {facts.here}" for facts in found if facts.here)
        problems.append(f"they reach this machine at different addresses ({seen}) -> name all of them in one network")
    if problems:
        named = "\n".join(f"  {problem}" for problem in problems)
        all_checks = f"All checks: workbench doctor --hosts {text}" + (f" --python {python}" if python else "")
        raise SessionError(f"{asked}: no engine was started.\n{named}\n{all_checks}")
    spread = _spread(found, engines)
    address = next(iter(addresses))
    settings = {
        "Cluster.engine_launcher_class": "ssh",
        "Cluster.n": sum(spread.values()),
        "SSHEngineSetLauncher.engines": spread,
        "SSHLauncher.remote_python": python or sys.executable,
        "SSHLauncher.ssh_args": list(command[1:]),
        "Cluster.controller_ip": address,
    }
    where = ", ".join(f"{number} on {host}" for host, number in spread.items())
    lines = (
        f"SSH starts {counted(sum(spread.values()), 'engine')}: {where}; Python there: {python or sys.executable}",
        f"the controller is here and listens on {address}, encrypted",
    )
    name = f"workbench-{_name_of(','.join(hosts), ','.join(host.rpartition('@')[2] for host in hosts))}"
    return _write(name, asked, settings, sum(spread.values()), lines)


def slurm_profile(text: str, engines: int | None = None) -> MadeProfile:
    """A profile for engines in a Slurm job.

    Args:
        text: options of ``sbatch``: ``"partition=gpu nodes=2 gpus-per-node=8 time=01:00:00"``.
        engines: default: one for each GPU, or for each task of ``ntasks-per-node``.

    Raises:
        SessionError: an option does not exist, is there twice or has no such value; or there is no Slurm here. It
            names all mistakes.
    """
    asked = f'%workbench start --slurm "{text}"'
    options, mistakes = _slurm_options(text)
    if shutil.which("sbatch") is None:
        mistakes.append("there is no sbatch here: start the notebook on a login node of the cluster")
    nodes = int(options.get("nodes", "0")) if options.get("nodes", "").isdecimal() else 0
    gpus = _num_gpus(options.get("gpus-per-node", ""))
    per_node = int(options["ntasks-per-node"]) if options.get("ntasks-per-node", "").isdecimal() else gpus
    if engines is not None and not mistakes:
        check_num_engines(engines, f"{asked} --engines {engines}")
        most = max(nodes, 1) * per_node
        if nodes and per_node and engines > most:
            mistakes.append(f"{engines} engines, but {counted(nodes, 'node')} of {per_node} are {most}")
        per_node = -(-engines // nodes) if nodes else per_node or engines
    elif not per_node and not mistakes:
        mistakes.append("how many engines? Add --engines N, gpus-per-node=N or ntasks-per-node=N")
    if mistakes:
        raise SessionError(f"{asked}: {'; '.join(mistakes)}.")
    number = engines or max(nodes, 1) * per_node
    shown = f"slurm-{options['partition']}" if "partition" in options else "slurm"
    name = f"workbench-{_name_of(' '.join([shown, *map('='.join, sorted(options.items()))]), shown)}"
    address = _address_for_nodes(options)
    settings = {
        "Cluster.engine_launcher_class": "slurm",
        "Cluster.n": number,
        "Cluster.controller_ip": address,
        "SlurmEngineSetLauncher.batch_file_name": str(_profile_folder(name) / "engines.sbatch"),
        "SlurmEngineSetLauncher.batch_template": _batch_file(options, per_node, gpus),
    }
    lines = (
        f"sbatch asks for {counted(number, 'engine')}, {per_node} on a node: {text}",
        f"the job may wait in the queue: squeue --me; its batch file: {_profile_folder(name) / 'engines.sbatch'}",
        f"the controller is here and listens on {'all interfaces' if address == '*' else address}, encrypted",
    )
    return _write(name, asked, settings, number, lines)


def _name_of(asked: str, shown: str) -> str:
    """A name for what was asked for: its part that is shown, with a number of all of it unless it is the same.

    >>> _name_of("gpu01", "gpu01"), _name_of("me@gpu01,you@gpu02", "gpu01,gpu02")
    ('gpu01', 'gpu01-gpu02-61afd7')
    """
    name = re.sub(r"[^A-Za-z0-9_]+", "-", shown)[:_LONGEST_NAME].strip("-")
    return name if name == asked else f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:6]}".strip("-")


def _problems(facts: HostFacts) -> list[str]:
    """What keeps a host from running engines, each with its fix."""
    if facts.problem:
        return [f"{facts.host}: {facts.problem} -> {facts.fix}"]
    found = [f"{facts.host}: {what} -> {fix}" for what, fix in environment_problems(facts)]
    if facts.back:
        found.append(f"{facts.host}: {what_blocks(facts)} -> {OPEN_PORTS}")
    return found


OPEN_PORTS = "Open TCP from the hosts to this machine and between them, for all ports above 1023 (the firewall of each)"


def what_blocks(facts: HostFacts) -> str:
    """That a host cannot connect to this machine."""
    return f"it cannot connect to this machine at {facts.here or 'an unknown address'}: {facts.back}"


def environment_problems(facts: HostFacts) -> list[tuple[str, str]]:
    """How a host's Python differs from the one here, with the fix of each difference."""
    here = ".".join(map(str, sys.version_info[:2]))
    found = []
    if facts.python.split(".")[:2] != here.split("."):
        fix = f"Give both the same minor version: --python PATH names another interpreter there, with Python {here}"
        found.append((f"Python {facts.python}, here {here}", fix))
    there = dict(facts.packages)
    wanted = {name: own for name in PACKAGES if (own := _own_version(name))}
    wrong = {name: own for name, own in wanted.items() if there.get(name) != own}
    if wrong:
        said = ", ".join(f"{name} {there.get(name, 'missing')}, here {own}" for name, own in wrong.items())
        of_pypi = [f"{name}=={own}" for name, own in wrong.items() if name != "workbench"]
        installed = of_pypi if "workbench" not in wrong else ["PATH", *of_pypi]
        where = ", where PATH is this project's checkout or wheel" if "workbench" in wrong else ""
        found.append((said, f"Install there what is here: python -m pip install {shlex.join(installed)}{where}"))
    return found


def _own_version(name: str) -> str:
    """The version of a package here; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _spread(found: Sequence[HostFacts], engines: int | None) -> dict[str, int]:
    """How many engines start on which host."""
    if engines is None:
        return {facts.host: len(facts.gpus) or 2 for facts in found}
    each, more = divmod(engines, len(found))
    spread = {facts.host: each + (index < more) for index, facts in enumerate(found)}
    return {host: number for host, number in spread.items() if number}


def _slurm_options(text: str) -> tuple[dict[str, str], list[str]]:
    """The options of a text, and its mistakes."""
    options: dict[str, str] = {}
    mistakes = []
    try:
        words = shlex.split(text)
    except ValueError as error:
        return {}, [str(error)]
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if name not in _SBATCH:
            meant = suggest(name, sorted(_SBATCH))
            mistakes.append(f"{name!r} is no option here" + (f", did you mean {meant[0]!r}?" if meant else ""))
        elif name in options:
            mistakes.append(f"{name} is there twice")
        elif not value.isprintable():
            mistakes.append(f"{name}={value!r}: a value is one line")
        elif name not in _FLAGS and not value:
            mistakes.append(f"{name} has no value: {name}=...")
        elif name in _NUMBERS and not (value.isdecimal() and int(value)):
            mistakes.append(f"{name}={value}: it is a number from 1")
        elif name == "gpus-per-node" and not _num_gpus(value):
            mistakes.append(f"{name}={value}: it is a number from 1, or TYPE:NUMBER")
        options.setdefault(name, value)
    if any("is no option" in each for each in mistakes):
        mistakes.append(f"options of sbatch that may stand here: {', '.join(sorted(_SBATCH))}")
    return options, mistakes


def _num_gpus(text: str) -> int:
    number = text.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def _batch_file(options: Mapping[str, str], per_node: int, gpus: int) -> str:
    """The template of a job of ``{n}`` engines: all of them at first, later those that replace others or are added."""
    lines = [
        "#!/bin/sh",
        "#SBATCH --job-name=ipengine-{cluster_id}",
        "#SBATCH --export=ALL",
        "#SBATCH --output={output_file}",
        "#SBATCH --no-requeue",
        "#SBATCH --no-kill",
        "#SBATCH --ntasks={n}",
        f"#SBATCH --nodes={{-(-n // {per_node})}}",
        f"#SBATCH --ntasks-per-node={{min(n, {per_node})}}",
    ]
    if gpus:
        kind = options["gpus-per-node"].rpartition(":")[0]
        number = f"{{-(-min(n, {per_node}) * {gpus} // {per_node})}}"
        lines.append(f"#SBATCH --gpus-per-node={_literal(kind) + ':' if kind else ''}{number}")
    others = {name: value for name, value in options.items() if name not in _OF_EACH_JOB}
    lines += [f"#SBATCH --{name}" + (f"={_literal(value)}" if value else "") for name, value in others.items()]
    cpus = f"--cpus-per-task={options['cpus-per-task']} " if "cpus-per-task" in options else ""  # not the job's
    return "\n".join([*lines, f"srun {cpus}--no-kill --kill-on-bad-exit=0 {{program_and_args}}", ""])


def _literal(value: str) -> str:
    """A value for a template, as ``sbatch`` reads it.

    >>> _literal("two words {n}")
    "'two words {{n}}'"
    """
    return shlex.quote(value).replace("{", "{{").replace("}", "}}")


def _address_for_nodes(options: Mapping[str, str]) -> str:
    """This machine's address on the way to a node; ``*`` where it cannot be found. The first node may be this machine,
    whose own name leads to its loopback.
    """
    partition = [f"--partition={options['partition']}"] if "partition" in options else []
    command = ["sinfo", "--noheader", "--Node", "--format=%N", *partition]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        found = (address_towards(socket.gethostbyname(node)) for node in said)
        return next((each for each in found if not each.startswith("127.")), "127.0.0.1" if said else "*")
    except (OSError, subprocess.SubprocessError):
        return "*"


def _profile_folder(name: str) -> Path:
    return profiles_folder() / f"profile_{name}"


def profiles_folder() -> Path:
    """IPython's folder, in which profiles lie.

    Raises:
        SessionError: it cannot be written. IPython then names another temporary folder at each question.
    """
    from IPython.paths import get_ipython_dir

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "IPython (dir|parent) ", UserWarning)
        try:
            return Path(get_ipython_dir())
        except UserWarning as error:
            why = str(error).partition(",")[0]
    raise SessionError(
        f"Session: {why}, and the profiles of engines on other hosts lie there. Before the notebook starts, set "
        "IPYTHONDIR to a folder of yours, which the hosts of a batch system share."
    )


def _write(name: str, asked: str, settings: Mapping[str, object], engines: int, lines: tuple[str, ...]) -> MadeProfile:
    folder = _profile_folder(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "ipcluster_config.py"
    head = f"# Written by {' '.join(asked.split())}. The next such start writes it anew: change a copy."
    rows = [f"c.{key} = {value!r}" for key, value in settings.items()]
    path.write_text("\n".join([head, "c = get_config()", *rows, _COMMON]))
    return MadeProfile(name, path, engines, lines)
