"""What a notebook gets with a session: imports while engines start, and the magics."""

from __future__ import annotations

import sys
from importlib import import_module

from workbench.session.output.start_progress import in_notebook, ipython_shell
from workbench.transport.held_interrupt import HeldInterrupt


def load_in_notebook(module: str = "workbench.api") -> None:
    """Import what cells and the completion of ``wb.`` need, torch above all, if this is a notebook.

    It takes the time in which the notebook waits for engines, and its main thread: two threads of which one imports a
    package and the other a part of it break off each other's imports, and JupyterLab waits a second for completions.
    An interrupt waits for the end, because torch cannot be imported again after half of it.

    >>> load_in_notebook()                  # no notebook: nothing happens
    """
    if in_notebook():
        with HeldInterrupt():
            import_module(module)


def offer_magics() -> None:
    """In a notebook, make ``%%global`` and ``%workbench`` known, as ``%load_ext workbench`` does."""
    shell = ipython_shell()
    if shell is not None and shell.find_cell_magic("global") is None:
        sys.modules["workbench"].load_ipython_extension(shell)  # magics import the session
