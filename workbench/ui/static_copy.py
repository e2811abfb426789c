"""The copy of a widget that a saved notebook shows without a kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from IPython.display import display

from workbench.ui.failures import guarded

_DELAY_S = 0.5


class StaticCopy:
    """Displays the copy, and writes it again after changes. It does nothing before ``display``.

    Args:
        make: returns the copy, by MIME type.
        waits: whether it must not be written now. Call ``keep`` again later.
    """

    def __init__(self, make: Callable[[], dict[str, str]], waits: Callable[[], bool] = lambda: False) -> None:
        self._make, self._waits = make, waits
        self._handle: Any = None
        self._timer: threading.Timer | None = None
        self._write_soon = guarded(self.write)

    def display(self) -> None:
        """Display the copy in the present cell, below the widget; in a further cell too, where all are written."""
        place = True if self._handle is None else self._handle.display_id
        self._handle = display(self._make(), raw=True, display_id=place)

    def keep(self) -> None:
        """Write the copy soon, once for several changes."""
        if self._handle is None or self._timer is not None or self._waits():
            return
        self._timer = threading.Timer(_DELAY_S, self._write_soon)
        self._timer.daemon = True
        self._timer.start()

    def write(self) -> None:
        """Write the copy now."""
        self._timer = None
        if self._handle is not None and not self._waits():
            self._handle.update(self._make(), raw=True)
