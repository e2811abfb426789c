"""Magics that come with a session, without a line that loads them."""

from __future__ import annotations

import sys


def offer_magics() -> None:
    """In a notebook, make ``%%global`` and ``%workbench`` known, as ``%load_ext workbench`` does."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and shell.find_cell_magic("global") is None:
        sys.modules["workbench"].load_ipython_extension(shell)  # magics import the session
