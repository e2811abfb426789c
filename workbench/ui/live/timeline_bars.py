"""The bars of a step's timeline: measured ones, the idle ground behind them, and thin simulated ones below.

Pure functions: spans -> arrays. Each rank of ``shown_ranks`` has a row. Times are seconds from the step's start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workbench.core.metrics import ACTION_NAMES, ActionSpan, StepSpans, bubble
from workbench.errors import StrategyError
from workbench.pipeline.schedules import Action
from workbench.pipeline.simulate import Span, Timeline, measured_durations, simulate
from workbench.ui.live.figure_layout import shown_ranks
from workbench.ui.number_text import percent, signed_percent
from workbench.ui.pictures.svg import text_width
from workbench.units import format_bytes, format_seconds

KINDS = ("forward", "backward", "optimizer_step", "boxing")
"""Of bars: their colours in a palette."""
_KIND_OF = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "O": "optimizer_step"}


@dataclass
class Bars:
    """Bars of one colour: row, start and length in seconds, a label, and the text of the tip."""

    rows: list[int] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    length_s: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    tips: list[str] = field(default_factory=list)

    def add(self, row: int, start_s: float, length_s: float, label: str = "", tip: str = "") -> None:
        """Add a bar."""
        self.rows.append(row)
        self.start_s.append(start_s)
        self.length_s.append(length_s)
        self.labels.append(label)
        self.tips.append(tip)


@dataclass(frozen=True)
class TimelineBars:
    """A step as bars by kind. ``simulated_s`` is None without a simulation."""

    step: int
    measured: Mapping[str, Bars]
    simulated: Mapping[str, Bars]
    measured_s: float
    simulated_s: float | None
    bubble: float | None
    simulated_bubble: float | None

    def summary(self, width_px: float = math.inf) -> str:
        """``measured 1.86 s, simulated 1.84 s (-1 %) \u00b7 bubble 25 % measured, 26 % simulated``; in so many pixels
        ``1.86 s, simulated 1.84 s \u00b7 bubble 25 %, simulated 26 %``.
        """
        measured, times = format_seconds(self.measured_s), ""
        if self.simulated_s:
            times = f", simulated {format_seconds(self.simulated_s)}"
            difference = f" ({signed_percent(self.simulated_s / self.measured_s - 1)})"
        whole, brief = f"measured {measured}{times and times + difference}", f"{measured}{times}"
        if self.bubble:
            simulated = percent(self.simulated_bubble) if self.simulated_bubble else ""
            whole += f" \u00b7 bubble {percent(self.bubble)} measured{simulated and f', {simulated} simulated'}"
            brief += f" \u00b7 bubble {percent(self.bubble)}{simulated and f', simulated {simulated}'}"
        return whole if text_width(whole) <= width_px else brief


def timeline_bars(ranks: Sequence[StepSpans], expected: Timeline | None = None) -> TimelineBars:
    """The bars of a step.

    Args:
        ranks: every rank's spans of the step.
        expected: a simulated timeline, a row per stage. Without it the step is simulated from the measured work of each
            action, which then waits for its inputs only.
    """
    start_s = min(span.start_s for rank in ranks for span in rank.spans)
    stop_s = max(span.stop_s for rank in ranks for span in rank.spans)
    simulated = expected or simulated_from(ranks)
    rows = simulated.spans if simulated else ()
    by_action = {span.action: span.stop_s - span.start_s for spans in rows for span in spans}
    measured = {kind: Bars() for kind in KINDS}
    thin = {kind: Bars() for kind in KINDS}
    for row, number in enumerate(shown_ranks(len(ranks))):
        rank = ranks[number]
        for span in rank.spans:
            _add_measured(measured, row, rank.rank, span, start_s, by_action)
        _add_simulated(thin, row, rank.spans[0].stage, rows)
    return TimelineBars(
        step=ranks[0].step,
        measured=measured,
        simulated=thin,
        measured_s=stop_s - start_s,
        simulated_s=simulated.makespan_s if simulated else None,
        bubble=bubble(ranks),
        simulated_bubble=simulated.bubble if simulated else None,
    )


def simulated_from(ranks: Sequence[StepSpans]) -> Timeline | None:
    """The simulated step. Each action takes the time of its stage's actions of that kind, and starts without delay.

    None if the actions come from no schedule: the ranks of a stage have different actions, there are no actions, or one
    follows what no rank did, such as a backward without a forward.
    """
    tables: dict[int, list[Action]] = {}

    for rank in ranks:
        actions = [span for span in rank.spans if span.kind != "O"]
        if not actions:
            return None
        table = [Action(span.stage, span.kind, span.micro_batch) for span in actions]
        if tables.setdefault(actions[0].stage, table) != table:
            return None

    if set(tables) != set(range(len(tables))):
        return None
    num_stages = 1 + max(action.stage for table in tables.values() for action in table)
    duration = measured_durations([_as_timeline(ranks)])
    try:
        return simulate([tables[stage] for stage in sorted(tables)], num_stages, duration)
    except StrategyError:
        return None


def _as_timeline(ranks: Sequence[StepSpans]) -> Timeline:
    return Timeline(
        tuple(
            tuple(
                Span(rank.rank, Action(s.stage, s.kind, s.micro_batch), s.start_s, s.stop_s, s.boxing_s)
                for s in rank.spans
                if s.kind != "O"
            )
            for rank in ranks
        )
    )


def _add_measured(
    bars: Mapping[str, Bars], row: int, rank: int, span: ActionSpan, start_s: float, expected: Mapping[Action, float]
) -> None:
    length, boxing = span.stop_s - span.start_s, min(span.boxing_s, span.stop_s - span.start_s)
    label = f"{span.kind}{span.micro_batch}" if span.kind != "O" else ""
    what = ACTION_NAMES.get(span.kind, span.kind) + (f", micro-batch {span.micro_batch}" if span.kind != "O" else "")
    lines = [f"<b>rank {rank} \u00b7 {label or 'step'}</b> {what}", f"{format_seconds(length)} measured"]
    simulated_s_of = expected.get(Action(span.stage, span.kind, span.micro_batch)) if span.kind != "O" else None
    lines[1] += f", {format_seconds(simulated_s_of)} simulated" if simulated_s_of is not None else ""
    if span.num_exchanges:
        moved = f"{span.num_exchanges} exchange{'s' * (span.num_exchanges > 1)}, {format_bytes(span.sent_bytes)} sent"
        lines.append(f"boxing {format_seconds(boxing)} of it: {moved}")
    tip = "<br>".join(lines)
    bars[_KIND_OF.get(span.kind, "backward")].add(row, span.start_s - start_s, length - boxing, label, tip)
    if boxing > 0:
        bars["boxing"].add(row, span.stop_s - boxing - start_s, boxing, "", tip)


def _add_simulated(bars: Mapping[str, Bars], row: int, stage: int, rows: Sequence[Sequence[Span]]) -> None:
    own = next((spans for spans in rows if spans and spans[0].action.stage == stage), ())
    for span in own:
        name = f"{span.action.kind}{span.action.micro_batch}"
        tip = f"{name} simulated: {format_seconds(span.stop_s - span.start_s)}"
        kind = _KIND_OF.get(span.action.kind, "backward")
        bars[kind].add(row, span.start_s, span.stop_s - span.start_s, "", tip)
