"""Show what the engines of a notebook do now.

Prints a line per rank: idle, or busy at which line of the cell; its process and its memory. Also answers while a cell
runs or is stuck. Finds the engines of all your notebooks and scripts on this host, and runs nothing on them.
"""

from __future__ import annotations

import argparse

from workbench.cli.engines import add_session_option, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench status``."""
    add_session_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line about every rank."""
    from workbench.session import text_reports

    return show(args, text_reports.status_lines)
