"""Show the Python stack of each rank of a notebook's engines, from the cell inwards.

Also answers while a cell runs or is stuck.
"""

from __future__ import annotations

import argparse

from workbench.cli.engines import add_session_option, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench dump``."""
    add_session_option(parser)
    parser.add_argument("--ranks", help="these ranks only, e.g. 1 or 0,2-3")


def run(args: argparse.Namespace) -> int:
    """Print the stacks."""
    from workbench.session import text_reports

    return show(args, lambda session: text_reports.dump_lines(session, text_reports.ranks_of(session, args.ranks)))
