"""The profile of a run below its log: the table, and the button that opens its file in Perfetto."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as widgets

from workbench.core.profile import DEFAULT_STEPS, DEFAULT_WARMUP, Profile
from workbench.ui.assets import element
from workbench.ui.controls import bar, button, html
from workbench.units import counted


class ProfileSection:
    """``button`` asks for a profile, ``box`` shows the last one. An output shows it as a cell would: the notebook
    resolves its links, and runs the script of its button.

    Args:
        profile: asks the run for a profile.
    """

    def __init__(self, profile: Callable[[], None]) -> None:
        self.button = button("Profile", profile)
        self._title, self._output = html(), widgets.Output()
        self.box = widgets.VBox([bar(self._title), self._output])
        self.box.add_class("wb-profile")
        self.box.layout.display = "none"

    def show(self, profile: Profile, name: str) -> None:
        """Show the profile of the run of this name."""
        self._title.value = element("b", text=f"Profile of {name}", css="wb-title")
        data = {"text/plain": str(profile), "text/html": profile._repr_html_()}
        self._output.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)
        self.box.layout.display = ""

    def refresh(self, busy: bool) -> None:
        """Say what the button does."""
        steps = f"{counted(DEFAULT_STEPS, 'step')} after {counted(DEFAULT_WARMUP, 'other')}"
        start = "" if busy else "train with this strategy, and "
        self.button.tooltip = f"{start}see where time and memory go in {steps}"
