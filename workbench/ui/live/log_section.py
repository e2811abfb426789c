"""The log below the live figure, with a choice of ranks and a switch to follow new lines."""

from __future__ import annotations

import ipywidgets as widgets

from workbench.ui.controls import bar, html, on_value
from workbench.ui.live.run_log import RunLog


class LogSection:
    """A bar of controls and the lines of one run's log; ``show`` updates them.

    Args:
        num_ranks: the number of ranks to choose from.
    """

    def __init__(self, num_ranks: int) -> None:
        self.log = RunLog(num_ranks)
        self._num_ranks = num_ranks
        self._shown: tuple[int, str] | None = None
        choices = [("all ranks", ""), *((f"rank {rank}", str(rank)) for rank in range(num_ranks))]
        self.ranks = widgets.Dropdown(options=choices, layout={"width": "110px"})
        self.follow = widgets.Checkbox(value=True, description="follow", indent=False)
        for control in (self.ranks, self.follow):
            on_value(control, lambda change: self.show())
        self.count, self.lines = html(), html("", "wb-log")
        title = html('<b class="wb-title">Log</b>')
        controls = (title, self.ranks, self.count, html("", "wb-space"), self.follow)
        self.bar = bar(*controls, css=("wb-bar", "wb-log-bar"))

    def clear(self) -> None:
        """Empty the log for another run."""
        self.log, self._shown = RunLog(self._num_ranks), None

    def show(self) -> None:
        """Show the newest lines, or only their number if they are not followed."""
        chosen = self.ranks.value
        lines = [line for line in self.log.lines if not chosen or line.ranks == "all" or chosen == line.ranks]
        if (self.log.count, chosen) == self._shown:
            return
        follows = self.follow.value or self._shown is None or self._shown[1] != chosen
        new = "" if follows or self._shown is None else f", {self.log.count - self._shown[0]} new"
        self.count.value = f'<span class="wb-quiet">{len(lines)} of {self.log.count} lines{new}</span>'
        if not follows:
            return
        self._shown = (self.log.count, chosen)
        self.lines.value = f'<div class="wb-log-lines"><div>{self.log.html(lines)}</div></div>'
