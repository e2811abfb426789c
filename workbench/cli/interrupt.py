"""Interrupt the cell that a notebook's engines run, as the notebook's own interrupt does.

A rank that does not react within two seconds is killed and loses its variables. An import, and an except or
finally clause that handles an interrupt, end first.
"""

from __future__ import annotations

import argparse

from workbench.cli.engines import add_session_option, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench interrupt``."""
    add_session_option(parser)


def run(args: argparse.Namespace) -> int:
    """Interrupt, and print how each rank ended."""
    from workbench.session import text_reports

    return show(args, text_reports.interrupt_lines)
