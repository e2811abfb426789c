"""Check this machine, and say how to repair what fails.

Checks versions, cores, memory, GPUs, transports and the loopback interface, and starts an engine. Exits with 1 if a
requirement of the workbench fails; warnings name features that will be missing.

With --hosts it checks other hosts instead, for engines over SSH: ssh, Python and packages, clock, network, GPUs, and an
exchange between all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

from workbench.cli import checks, host_checks
from workbench.cli.checks import BAD, Finding

_NEEDED = ("torch", "numpy", "pandas", "psutil", "cloudpickle", "ipyparallel", "ipykernel")
_FOR_NOTEBOOKS = ("jupyterlab", "ipywidgets", "anywidget", "plotly")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench doctor``."""
    parser.add_argument("--quick", action="store_true", help="do not start an engine; with --hosts, no exchange")
    parser.add_argument("--hosts", metavar="A,B", help="check these hosts instead, as ssh knows them")
    parser.add_argument("--python", default="", metavar="PATH", help="the Python on the hosts (default: as here)")


def find(quick: bool = False) -> Iterator[Finding]:
    """All findings in order, without those that need a missing package, or another system."""
    yield (python := checks.check_python())
    if python.state == BAD:
        return
    yield from (checks.check_package(name) for name in _NEEDED)
    yield from (checks.check_package(name, extra="lab") for name in _FOR_NOTEBOOKS)
    yield checks.check_package("scikit-learn", extra="demo")
    for needs, check in _checks(quick):
        if all(checks.has_module(name) for name in needs):
            yield check()


def _checks(quick: bool) -> Sequence[tuple[tuple[str, ...], Callable[[], Finding]]]:
    """The checks, each with the modules that it needs."""
    always: list[tuple[tuple[str, ...], Callable[[], Finding]]] = [
        (("psutil",), checks.check_machine),
        (("torch",), checks.check_gpus),
        (("torch",), checks.check_backends),
        (("torch", "psutil"), checks.check_transport),
        ((), checks.check_loopback),
    ]
    return always if quick else [*always, (_NEEDED, checks.check_engine)]


def format_finding(finding: Finding) -> str:
    """One finding as text, with its fix on a line of its own."""
    line = f"{finding.state:<5} {finding.what:<13} {finding.text}"
    return f"{line}\n{'':<20}-> {finding.fix}" if finding.fix else line


def run(args: argparse.Namespace) -> int:
    """Print each finding at once. The exit code is 1 if a requirement fails."""
    bad = []
    found = host_checks.find(args.hosts, args.python, args.quick) if args.hosts is not None else find(args.quick)
    for finding in found:
        print(format_finding(finding), flush=True)
        bad += [finding.what] if finding.state == BAD else []
    print(f"Does not work: {', '.join(bad)}." if bad else "All that is needed works.")
    return 1 if bad else 0
