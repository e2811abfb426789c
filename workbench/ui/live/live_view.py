"""``wb.LiveView``: the live view for your own training loops, fed by ``wb.log`` in ``%%global`` cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

import ipywidgets as widgets

from workbench.core.metrics import LastSteps, RunEvent, StepBlock, StepSpans, joined
from workbench.session.cluster import Session, current
from workbench.theme import style_sheet
from workbench.ui.assets import asset, element
from workbench.ui.controls import display_widget, html
from workbench.ui.failures import Failures
from workbench.ui.grid.widget import PANEL_CLASS
from workbench.ui.live import run_view
from workbench.ui.page_link import PageLink
from workbench.ui.page_restore import MissedChanges
from workbench.ui.panel_texts import why_ended
from workbench.ui.static_copy import StaticCopy
from workbench.writers.choose import Log, writers
from workbench.writers.run_log import RunLog

_writing: WeakSet[LiveView] = WeakSet()
"""The views that have a log."""


class LiveView(widgets.VBox):
    """Shows the reports of ``wb.log``: throughput, loss, memory, time split, timeline, log. Display it in its own cell,
    above the loops.

    Args:
        session: the session whose cells report. Default: the current one.
        log: where the loops' steps are written too, see ``wb.compare``; one run for each loop. The newest view with a
            log writes: the cell that makes it may run again.

    Raises:
        NotStartedError: no session is open.
        RunError: no writer has the name in ``log``, or its package is not installed.

    >>> wb.LiveView()                                            # doctest: +SKIP
    """

    _end_subscription: Callable[[], None] | None = None
    _log = RunLog((), "", {})

    def __init__(self, session: Session | None = None, log: Log | None = None) -> None:
        self._writers = writers(log)
        self._session = session = session or current()
        if self._writers:
            for earlier in [view for view in _writing if view._session is session]:
                earlier._writers = ()
                earlier._log.close()
            _writing.add(self)
        # While a cell runs, the kernel handles no messages of the page, so do not wait for any.
        self.failures = Failures()
        with self.failures.collecting():
            self.live = run_view.RunView(session.num_engines, answer_timeout_s=0.5)
            # now: the kernel handles no message of a page while a cell runs
            page = PageLink(on_width=self.live.fit, on_view=lambda view: missed.send_to(view))
        self._number = 0
        self._is_going = self._has_ended = False
        self._last: list[LastSteps] = []  # per rank: steps not yet reported when the cell ended
        self._copy = StaticCopy(self._static_bundle)
        style = html(f"<style>{style_sheet(f'.{PANEL_CLASS}')}{asset('panel.css')}</style>")
        self._hint = html('<div class="wb-section wb-quiet">waits for wb.log(loss=..., samples=...) in a cell</div>')
        super().__init__([style, page, self.failures.box, self._hint, self.live.box])
        self.add_class(PANEL_CLASS)
        missed = MissedChanges(self)
        self._end_subscription = session.subscribe(self.failures.guard(self.on_message))

    def on_message(self, rank: int, message: object) -> None:
        """Handle a message that a rank has published."""
        if why := why_ended(message, "view", "make a new view: wb.LiveView()"):
            self._hint.value = element("div", text=why, css="wb-section wb-quiet")
            self._hint.layout.display = ""
            self._has_ended = True
            if self._is_going:
                self._end(self._last, why)
        if self._has_ended:
            return
        if isinstance(message, StepBlock) and (message.first_step == 0 or self.live.history is None):
            self._begin()
        if isinstance(message, LastSteps):  # of any rank, perhaps before rank 0 reports the first steps
            self._last.append(message)
        elif isinstance(message, RunEvent) and message.kind == "ended":
            last, self._last = self._last, []
            if self._is_going:
                self._end(last, message.text or None)
        elif self._is_going and isinstance(message, (StepBlock, StepSpans)):
            self._add(message)

    def _add(self, message: StepBlock | StepSpans) -> None:
        self._log.add([message])
        self.live.add([message])

    def _begin(self) -> None:
        self._number += 1
        self._log.close()
        self._log = RunLog(self._writers, f"own loop {self._number}", {})
        self._is_going = True
        self._hint.layout.display = "none"
        self.live.begin(f"own loop {self._number}", "", 0)

    def _end(self, last: Sequence[LastSteps], error: str | None) -> None:
        self._is_going = False
        block = joined(last) if last else None
        if block is not None:
            self._add(block)
        self._log.close(error)
        if error is None:
            self.live.end("ended", f"last report: step {self._num_steps}")
        else:
            self.live.log.say(f"failed: {error.splitlines()[0]}", warns=True)
            self.live.end("failed", f"last report: step {self._num_steps}", "failed")
        self._copy.write()

    def _ipython_display_(self) -> None:
        """Display the widget and its static copy, which the style hides while the widget works."""
        self.live.prepare()
        display_widget(self)
        self._copy.display()

    def _static_bundle(self) -> dict[str, str]:
        style = element("style", style_sheet(".wb-static"))
        page = element("div", style, self.live.static_html(), css="wb-static")
        return {"text/html": page, "text/plain": f"Live view of loop {self._number}, {self._num_steps} steps"}

    @property
    def _num_steps(self) -> int:
        return self.live.history.last_step if self.live.history is not None else 0

    def close(self) -> None:
        """Stop listening, and end the log."""
        self._log.close()
        end, self._end_subscription = self._end_subscription, None
        if end is not None:
            end()
        super().close()
