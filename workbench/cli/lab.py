"""Open JupyterLab on the first notebook.

Outside of a checkout the command first copies the package's notebooks into the current folder, where you can change
them. It does not overwrite notebooks.

On a machine without a browser, ``--no-browser`` prints the address of the notebook. Options after ``--`` go to
JupyterLab: workbench lab --no-browser -- --port 8890
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from importlib.metadata import files
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from workbench.cli.results import require
from workbench.errors import CommandError

FIRST_NOTEBOOK = "01-compare-strategies.ipynb"
CHECKOUT = Path(__file__).resolve().parents[2] / "notebooks"
COPIES = Path("workbench-notebooks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench lab``."""
    parser.add_argument("--notebook", type=Path, help=f"what to open (default: {FIRST_NOTEBOOK})")
    parser.add_argument("--no-browser", action="store_true", help="print the notebook's address and open no browser")
    parser.add_argument("jupyter", nargs="*", metavar="-- OPTIONS", help="options for JupyterLab")


def find_notebook(wanted: Path | None) -> Path:
    """The notebook to open: the given one, else the checkout's first one, else a copy of the package's.

    Raises:
        CommandError: there is none.
    """
    if wanted is None:
        in_checkout = CHECKOUT / FIRST_NOTEBOOK
        wanted = in_checkout if in_checkout.is_file() else copy_notebooks(COPIES) / FIRST_NOTEBOOK
    if not wanted.is_file():
        raise CommandError(f"no notebook at {wanted}. Name one: workbench lab --notebook FILE")
    return wanted


def copy_notebooks(folder: Path) -> Path:
    """Copy the installed package's notebooks into a folder without overwriting files; returns the folder.

    Raises:
        CommandError: the current folder cannot be written to.
    """
    try:
        folder.mkdir(exist_ok=True)
        for file in files("workbench") or ():
            copy = folder / file.name
            if file.match("share/workbench/*.ipynb") and not copy.exists():
                shutil.copyfile(file.locate(), copy)
    except OSError as error:
        raise CommandError(
            f"the notebooks are copied to {folder.absolute()}, and cannot be: {error.strerror}. Call it from a folder "
            "of your own."
        ) from error
    return folder


def lab_command(notebook: Path, options: list[str]) -> list[str]:
    """The command line that opens ``notebook`` with this interpreter's JupyterLab.

    The notebook is the server's default address and not an argument, so that the addresses that the server prints open
    it.
    """
    path = notebook.resolve()
    place = [f"--ServerApp.root_dir={path.parent}", f"--LabApp.default_url=/lab/tree/{quote(path.name)}"]
    # JupyterLab refuses root, the usual user of a container, and says so only inside a long log.
    as_root = ["--allow-root"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
    return [sys.executable, "-m", "jupyterlab", *as_root, *place, *options]


def run(args: argparse.Namespace) -> NoReturn:
    """Replace this process by JupyterLab.

    Raises:
        CommandError: there is no such notebook, or no JupyterLab.
    """
    if args.notebook is None:
        require("demo", "jupyterlab", "sklearn")  # the first notebook trains on scikit-learn's digits
    else:
        require("lab", "jupyterlab")
    notebook = find_notebook(args.notebook)
    command = lab_command(notebook, ["--no-browser"] * args.no_browser + args.jupyter)
    doing = "serving" if args.no_browser else "opening"
    then = "open the last address printed below in a browser; " if args.no_browser else ""
    print(f"{doing} {notebook}; {then}press Ctrl-C twice to end", flush=True)
    os.execv(command[0], command)
