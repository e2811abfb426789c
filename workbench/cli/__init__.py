"""The command ``workbench``: the notebook's functions in a terminal.

    workbench demo        four strategies on handwritten digits, checked against one device
    workbench compare     the same for your own model, from a Python file
    workbench plan        the best strategy for a model on a machine that need not be here
    workbench script      a chosen strategy as a script for torchrun, with the workbench or with torch alone
    workbench simulate    predicted training steps for a table of transformers
    workbench status      what the engines of a notebook do now, also while a cell is stuck; also: dump, interrupt
    workbench doctor      checks this machine, and says how to repair what fails
    workbench lab         JupyterLab on the first notebook

Each command is a module with ``add_arguments(parser)`` and ``run(args) -> exit code``. A command loads heavy libraries
when it runs, so ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO

from workbench.cli import compare, demo, doctor, dump, interrupt, lab, plan, script, simulate, status
from workbench.errors import WorkbenchError

_COMMANDS = {
    "demo": demo,
    "compare": compare,
    "plan": plan,
    "script": script,
    "simulate": simulate,
    "status": status,
    "dump": dump,
    "interrupt": interrupt,
    "doctor": doctor,
    "lab": lab,
}
USER_ERROR = 2
INTERRUPTED = 130
OUTPUT_CLOSED = 141  # as a shell reports a program that a closed pipe has ended


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; the help of each is its module's docstring."""
    parser = argparse.ArgumentParser("workbench", description="The interactive workbench for parallel training.")
    ours = sys.modules[__name__.partition(".")[0]].__version__  # the package itself is above all rooms
    parser.add_argument("--version", action="version", version=f"workbench {ours}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, refuse=command.error)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 success, 1 the check failed, 2 a mistake in the arguments, 130 an
    interrupt, 141 that nothing reads the output any more (``workbench status | head -1``).
    """
    try:
        try:
            return _run(arguments)
        finally:
            print(end="", flush=True)  # so that a closed pipe is found here, not when the interpreter ends
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:  # it is another pipe or connection
            raise
        for stream in closed:  # the interpreter writes what they hold when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return OUTPUT_CLOSED


def _run(arguments: Sequence[str] | None) -> int:
    args, unknown = make_parser().parse_known_args(arguments)
    if unknown:  # shows the usage of this command, not that of all
        args.refuse(f"unrecognized arguments: {' '.join(unknown)} (workbench {args.command} --help lists all)")
    try:
        return int(args.run(args))
    except WorkbenchError as error:
        prefix = f"workbench {args.command}: "
        print(f"{prefix}{str(error).removeprefix(prefix)}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt as interrupt:
        if text := str(interrupt):  # what is kept, for example
            print(text, file=sys.stderr)
        return INTERRUPTED


def _is_closed(stream: TextIO) -> bool:
    """Whether a stream is a pipe that nothing reads."""
    poller = select.poll()
    poller.register(stream, 0)  # reports errors only
    return bool(poller.poll(0))
