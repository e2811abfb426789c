"""The checks of ``workbench doctor --hosts``: can these hosts run engines, and exchange with one another?"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence

from workbench.cli.checks import BAD, GOOD, WARNING, Finding
from workbench.session.processes import make_profile, ssh
from workbench.session.processes.host_facts import HostFacts, ask_hosts, parse_hosts
from workbench.units import counted, format_seconds

_CLOCK_LIMIT_S = 1.0
_EXCHANGE_TIMEOUT_S = 90.0
_EXCHANGE = """
import datetime, json, os, sys, time
backend, rank, size, place, interface = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
    if interface:
        os.environ.setdefault(name, interface)
import torch
import torch.distributed as dist
limit = datetime.timedelta(seconds=40)
dist.init_process_group(backend, init_method=place, rank=rank, world_size=size, timeout=limit)
sent = torch.ones(1 << 18, device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(sent)
began = time.perf_counter()
for _ in range(5):
    dist.all_reduce(sent)
value = sent[0].item()
took = (time.perf_counter() - began) / 5
nccl = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""
print("said:" + json.dumps({"value": value, "took_s": took, "nccl": nccl}))
dist.destroy_process_group()
"""


def find(text: str, python: str = "", quick: bool = False, command: Sequence[str] = ("ssh",)) -> Iterator[Finding]:
    """All findings about the hosts of a text such as ``"a,me@b"``, in order.

    Raises:
        SessionError: the text names no hosts, or one twice.
    """
    facts = ask_hosts(parse_hosts(text, f"workbench doctor --hosts {text}"), python, command)
    for each in facts:
        yield from _of_host(each)
    usable = [each for each in facts if not each.problem]
    yield from _same_machines(usable)
    yield from _gpus(usable)
    if len(usable) == len(facts) and not quick:
        yield _exchange("gloo", usable, python, command)
        if all(each.gpus for each in usable):
            yield _exchange("nccl", usable, python, command)


def _of_host(facts: HostFacts) -> Iterator[Finding]:
    """What one host said for itself."""
    if facts.problem:
        yield Finding(facts.host, BAD, facts.problem, facts.fix)
        return
    wrong = make_profile.environment_problems(facts)
    packages = ", ".join(f"{name} {number}" for name, number in facts.packages)
    yield Finding(facts.host, GOOD, f"ssh reaches {facts.name}; Python {facts.python}; {packages or 'no packages'}")
    yield from (Finding(facts.host, BAD, what, fix) for what, fix in wrong)
    if facts.back:
        yield Finding(facts.host, BAD, make_profile.what_blocks(facts), make_profile.OPEN_PORTS)
    else:
        where = f"{facts.address} on {facts.interface}" if facts.interface else facts.address
        yield Finding(facts.host, GOOD, f"{where}; connects to this machine at {facts.here}")
    ahead, error = facts.clock_s, facts.clock_error_s
    if abs(ahead) > _CLOCK_LIMIT_S + error:
        said = f"its clock is {format_seconds(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the one here"
        yield Finding(
            facts.host, WARNING, said, "Errors name the first rank that failed by its clock: run chrony there"
        )
    else:
        yield Finding(
            facts.host, GOOD, f"its clock is that of this machine, within {format_seconds(_CLOCK_LIMIT_S + error)}"
        )


def _same_machines(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    names: dict[str, list[str]] = {}
    for each in facts:
        names.setdefault(each.name, []).append(each.host)
    for name, hosts in names.items():
        if len(hosts) > 1:
            fix = "Name it once with more engines; if they are two machines, give each a host name of its own."
            yield Finding("hosts", WARNING, f"{', '.join(hosts)} all call themselves {name}", fix)


def _gpus(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    for each in facts:
        kinds = dict.fromkeys(line.partition(": ")[2].partition(" (UUID")[0] for line in each.gpus)
        text = (
            f"{counted(len(each.gpus), 'GPU')}: {', '.join(kinds)}" if each.gpus else "no GPU; engines run on the CPU"
        )
        if each.gpu_problem:
            fix = f"Repair the driver there, until this lists the GPUs: ssh {each.host} nvidia-smi -L"
            yield Finding(each.host, WARNING, f"nvidia-smi: {each.gpu_problem}", fix)
        else:
            yield Finding(each.host, GOOD, text)
    if len({bool(each.gpus) for each in facts}) > 1:
        yield Finding("gpus", BAD, "only some hosts have GPUs", "Name hosts of one kind, or start with --device cpu.")


def _exchange(backend: str, facts: Sequence[HostFacts], python: str, command: Sequence[str]) -> Finding:
    """A sum over all hosts, by torch.distributed alone."""
    place = f"tcp://{facts[0].address}:{facts[0].port}"
    lines = {
        each.host: shlex.join(
            [python or sys.executable, "-", backend, str(rank), str(len(facts)), place, each.interface]
        )
        for rank, each in enumerate(facts)
    }
    found = ssh.ask_all(
        list(lines), lambda host: ssh.run_on(command, host, lines[host], _EXCHANGE, timeout_s=_EXCHANGE_TIMEOUT_S)
    )
    said = {host: [row for row in each.stdout.splitlines() if row.startswith("said:")] for host, each in found.items()}
    failed = next((host for host, rows in said.items() if not rows), None)
    if failed is None:
        answer = json.loads(said[facts[0].host][0].removeprefix("said:"))
        nccl = f" {answer['nccl']}" if answer["nccl"] else ""
        text = f"{backend}{nccl} adds 1 MB over {counted(len(facts), 'host')} in {format_seconds(answer['took_s'])}"
        return Finding("exchange", GOOD, text)
    last = (found[failed].stderr.strip().splitlines() or [f"exit status {found[failed].returncode}"])[-1]
    fix = (
        "Open TCP between the hosts for all ports above 1023. If they have several networks, name the interface of the "
        "right one by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, in the profile's environment."
    )
    return Finding("exchange", BAD, f"{backend} between the hosts: {failed}: {last}", fix)
