"""The engines of a notebook or script on this host, for commands in a terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.session import Session


def add_session_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects one of several sessions."""
    parser.add_argument(
        "--session", metavar="NAME", help="which session, if several run; without a name they are listed"
    )


def show(args: argparse.Namespace, lines: Callable[[Session], list[str]]) -> int:
    """Print the ``lines`` of the session that the arguments select.

    Raises:
        SessionError: there is no session, none of that name, or several without a name.
    """
    from workbench.session.observed_session import observe

    session = observe(args.session, f"workbench {args.command}", "--session NAME")
    try:
        print(session.title)
        print("\n".join(lines(session)))
    finally:
        session.close()
    return 0
