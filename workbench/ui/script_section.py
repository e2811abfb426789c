"""The chosen strategy as a script for torchrun: a button, and below it the text and its file."""

from __future__ import annotations

import threading
from collections.abc import Callable

import ipywidgets as widgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.ui.assets import asset
from workbench.ui.controls import bar, button, html, label, on_value
from workbench.ui.page_link import Downloads
from workbench.ui.page_restore import as_request

FILE = "script.py"
_LIBRARIES = (("the workbench", "workbench"), ("torch alone", "torch"))
_WRITING = "writes the script \u2026"


class ScriptPage(Downloads):
    """Shows ``text``, and hands it over as a file."""

    _esm = asset("controls.js") + asset("download.js") + asset("script.js")

    text = traitlets.Unicode("").tag(sync=True)


class ScriptSection:
    """``button`` opens and closes ``box``. A thread writes the script, since torch's own may have to try the model.

    Args:
        write: (library) -> the script of the strategy that is shown, as ``wb.planner.script``.
    """

    def __init__(self, write: Callable[[str], str]) -> None:
        self._write, self._number = write, 0
        self.button = button("Script", self.toggle, tooltip="this strategy as a Python script for torchrun")
        self.library = widgets.Dropdown(options=_LIBRARIES, layout={"width": "124px"})
        on_value(self.library, lambda change: self.write())
        self.save = button("Download", self._download, icon="download", disabled=True)
        self.note, self.page = html("", "wb-quiet"), ScriptPage()
        both = bar(label("trains with"), self.library, css=("wb-field",))
        self.box = widgets.VBox([bar(both, self.note, html("", "wb-space"), self.save), self.page])
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether the text is shown."""
        return self.box.layout.display != "none"

    def toggle(self) -> None:
        """Show the script, or hide it."""
        if self.is_open:
            self.close()
        else:
            self.box.layout.display = ""
            self.write()

    def close(self) -> None:
        """Hide the script."""
        self.box.layout.display, self.page.text = "none", ""

    def write(self) -> None:
        """Write the script again, in a thread."""
        if not self.is_open:
            return
        self._number += 1
        self.save.disabled, self.note.value = True, _WRITING
        args = self._number, self.library.value
        threading.Thread(target=as_request(self._work), args=args, name="workbench-write-script", daemon=True).start()

    def _work(self, number: int, library: str) -> None:
        text, is_script = "", False
        try:
            text, is_script = self._write(library), True
        except WorkbenchError as error:
            text = str(error)
        except Exception as error:  # noqa: BLE001 - a model may fail in any way; the panel says how
            text = f"{type(error).__name__}: {error}"
        if number == self._number and self.is_open:
            self.page.text, self.save.disabled = text, not is_script
            self.note.value = "for torchrun" if is_script else "no script:"

    def _download(self) -> None:
        self.page.download(FILE, self.page.text, "text/x-python")
