"""Open JupyterLab on the first notebook.

What follows the options is passed on to JupyterLab: workbench lab -- --no-browser --port 8890
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from workbench.cli.results import require
from workbench.errors import CommandError

FIRST_NOTEBOOK = "01-compare-strategies.ipynb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench lab``."""
    parser.add_argument("--notebook", type=Path, help=f"what to open (default: notebooks/{FIRST_NOTEBOOK})")
    parser.add_argument("jupyter", nargs="*", metavar="-- OPTIONS", help="options for JupyterLab")


def find_notebook(wanted: Path | None) -> Path:
    """The notebook to open: the one asked for, else the first one, in the checkout or below the current folder.

    Raises:
        CommandError: there is none.
    """
    checkout = Path(__file__).resolve().parents[2]
    places = [wanted] if wanted else [root / "notebooks" / FIRST_NOTEBOOK for root in (checkout, Path.cwd())]
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join(map(str, places))
    raise CommandError(f"lab: no notebook at {looked}. Name one: workbench lab --notebook FILE")


def lab_command(notebook: Path, options: list[str]) -> list[str]:
    """The command line that opens ``notebook`` with this interpreter's JupyterLab."""
    # Only root is refused by JupyterLab, which then says so in a long log: a container's usual user.
    as_root = ["--allow-root"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
    return [sys.executable, "-m", "jupyterlab", *as_root, *options, str(notebook)]


def run(args: argparse.Namespace) -> NoReturn:
    """Replace this process by JupyterLab.

    Raises:
        CommandError: there is no such notebook, or no JupyterLab.
    """
    notebook = find_notebook(args.notebook)
    require("lab", "lab", "jupyterlab")
    command = lab_command(notebook, args.jupyter)
    print(f"opening {notebook}; press Ctrl-C twice to end", flush=True)
    os.execv(command[0], command)
