"""Starts an eager program on several processes: ``python -m workbench.flow.launch --nproc_per_node 2 prog.py``.

torchrun (``torch.distributed.run``) starts the processes, sets their ranks, and ends all of them when one fails. The
program contains no call for that: the ranks join one world when it first uses ``flow``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence


def arguments_for_torchrun(given: Sequence[str] | None = None) -> list[str]:
    """The arguments of torchrun that correspond to the options of this command.

    >>> arguments_for_torchrun(["--nproc_per_node", "2", "prog.py", "--epochs", "3"])
    ['--nproc-per-node=2', '--standalone', 'prog.py', '--epochs', '3']
    """
    parser = argparse.ArgumentParser(prog="python -m workbench.flow.launch", description=__doc__)
    parser.add_argument("--nproc_per_node", "--nproc-per-node", default="1", help="processes per machine")
    parser.add_argument("--nnodes", default="1", help="number of machines")
    parser.add_argument("--node_rank", "--node-rank", default="0", help="number of this machine, from 0")
    parser.add_argument("--master_addr", "--master-addr", help="address of machine 0")
    parser.add_argument("--master_port", "--master-port", help="a free port there")
    parser.add_argument("--logdir", help="write the output of every rank below this folder")
    parser.add_argument("-m", "--module", action="store_true", help="the program is the name of a module")
    parser.add_argument("program", help="the program, followed by its own arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    passed = [f"--nproc-per-node={options.nproc_per_node}"]
    if options.nnodes == "1" and options.master_addr is None and options.master_port is None:
        passed.append("--standalone")  # a port that is free, so that two programs can run at the same time
    else:
        passed += [f"--nnodes={options.nnodes}", f"--node-rank={options.node_rank}"]
        passed += [
            f"--master-addr={options.master_addr or '127.0.0.1'}",
            f"--master-port={options.master_port or 29500}",
        ]
    if options.logdir is not None:
        passed += [f"--log-dir={options.logdir}", "--redirects=3"]
    return [*passed, *(["--module"] if options.module else []), options.program, *options.arguments]


def main(given: Sequence[str] | None = None) -> None:
    """The command."""
    passed = arguments_for_torchrun(given)
    from torch.distributed import run

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would say so, at length
    run.main(passed)


if __name__ == "__main__":
    main()
