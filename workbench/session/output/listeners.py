"""Receives a run's output and published objects: collects them, and passes them on while the run goes on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from workbench.session import protocol
from workbench.session.adapter import Event
from workbench.session.output.lines import Unfinished
from workbench.session.output.log import RunLog
from workbench.session.output.merging import Block, OutputMerger, as_text, display_id, tagged
from workbench.session.output.progress_bars import Bars, MergedBar
from workbench.session.output.progress_bars import as_text as bars_as_text

#: Receives every piece of merged output: the stream's name ("stdout" or "stderr") and the block.
Show = Callable[[str, Block], None]
#: Receives all unfinished lines as one text, again whenever they have changed; an empty one when there are none.
ShowUnfinished = Callable[[str], None]
#: Receives all progress bars of the run, again whenever they have changed.
ShowBars = Callable[[list[MergedBar]], None]
#: Receives every object that a rank has published: the rank and the object.
OnPublished = Callable[[int, object], None]


class OutputListener:
    """Merges the output of a run.

    ``show`` gets each block as soon as it is complete. ``log`` gets all text unchanged. ``hear`` gets published objects
    as they arrive; without it they wait for ``take_published``. ``show_unfinished`` gets the text of unfinished lines
    whenever it has changed.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        num_ranks: int,
        show: Show | None = None,
        merge: bool = True,
        log: RunLog | None = None,
        hear: OnPublished | None = None,
        show_unfinished: ShowUnfinished | None = None,
        show_bars: ShowBars | None = None,
    ) -> None:
        self._show_bars, self._bars = show_bars, Bars(ranks)
        self._show_unfinished, self._unfinished = show_unfinished, Unfinished()
        self._on_published = hear
        self._ranks, self._num_ranks, self._show, self._log = tuple(ranks), num_ranks, show, log
        self._output = OutputMerger(ranks, merge)
        self._lines: list[str] = []
        self._places: dict[str, int] = {}  # of displays that may be updated, among the lines
        self._published: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()

    def on_event(self, event: Event) -> None:
        if event.kind == "stream":
            name, text = event.content
            self._output.feed_stream(event.rank, name, text, event.time_s)
            if self._log is not None:
                self._log.write(event.rank, text)
        elif event.kind in ("display", "result", "update", "clear"):
            self._output.feed_bundle(event.rank, event.kind, event.content, event.time_s)
        elif isinstance(event.content, protocol.Bar):
            self._bars.take(event.rank, event.content)
        elif isinstance(event.content, protocol.Published) and self._on_published is not None:
            self._on_published(event.rank, protocol.load(event.content.payload))
        elif isinstance(event.content, protocol.Published):
            with self._lock:
                self._published.append((event.rank, event.content.payload))

    def on_idle(self, now: float) -> None:
        self._emit(now, final=False)
        self._draw_bars(now, final=False)
        if self._show_unfinished is not None:
            lines = self._unfinished.take(self._output.unfinished(), now)
            if lines is not None:
                self._show_unfinished("\n".join(tagged(ranks, text, self._num_ranks) for ranks, text in lines))

    def wakeup(self) -> float | None:
        bars = self._bars.wakeup() if self._show_bars is not None else None
        times = (self._output.wakeup(), self._unfinished.wakeup(), bars)
        return min((time for time in times if time is not None), default=None)

    def finish(self) -> None:
        """Pass on what still waits. Call it when the run has ended."""
        now = time.monotonic()
        for rank in self._ranks:
            self._output.finish(rank, now)
        self._emit(now, final=True)
        self._draw_bars(now, final=True)
        if self._show_unfinished is not None and self._unfinished.take([], math.inf) is not None:
            self._show_unfinished("")

    @property
    def text(self) -> str:
        """All output so far, each line with the ranks that printed it; displays as they are after their last update."""
        return "\n".join(self._lines)

    def take_published(self) -> list[tuple[int, object]]:
        """(rank, object) of everything published since the last call. Call it from any thread."""
        with self._lock:
            taken, self._published = self._published, []
        return [(rank, protocol.load(payload)) for rank, payload in taken]

    def _draw_bars(self, now: float, final: bool) -> None:
        """Show the present bars. The collected text gets them once, at the end."""
        if self._show_bars is not None:
            bars = self._bars.due(now, final)
            if bars is not None:
                self._show_bars(bars)
        if final and (bars := self._bars.merged()):
            self._lines.append(bars_as_text(bars))
            if self._show is not None and self._show_bars is None:
                self._show("stderr", Block("line", self._ranks, bars_as_text(bars)))

    def _emit(self, now: float, final: bool) -> None:
        for stream, block in self._output.take(now, final):
            self._collect(block)
            if self._show is not None:
                self._show(stream, block)

    def _collect(self, block: Block) -> None:
        if block.kind == "clear":  # the text keeps all output
            return
        text = as_text(block, self._num_ranks)
        place = display_id(block.ranks[0], block.content) if isinstance(block.content, dict) else ""
        if block.kind == "update" and place in self._places:
            self._lines[self._places[place]] = text
            return
        if place:
            self._places[place] = len(self._lines)
        self._lines.append(text)
