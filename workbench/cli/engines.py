"""The engines of a notebook or script that runs on this host, for the commands that look at them from a terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.session import Session


def add_session_option(parser: argparse.ArgumentParser) -> None:
    """The option that chooses among several sessions."""
    parser.add_argument("--session", metavar="NAME", help="which one, where several run; without it they are listed")


def show(args: argparse.Namespace, lines: Callable[[Session], list[str]]) -> int:
    """Print what ``lines`` says of the session that the arguments choose.

    Raises:
        SessionError: there is none, none of that name, or several to choose from.
    """
    from workbench.session.observed_session import observe

    session = observe(args.session, f"workbench {args.command}", "--session NAME")
    try:
        print(session.title)
        print("\n".join(lines(session)))
    finally:
        session.close()
    return 0
