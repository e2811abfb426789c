"""Pictures of a prediction: seconds of a step, memory of every rank, the pipeline's timeline.

Pure functions, ``Estimate`` -> HTML with SVG. Colours are the page's variables, so the same text reads in both themes,
in a saved or printed notebook; no script is needed, and a toggle costs no figure of 5 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.strategy import ResolvedStrategy
from workbench.cost.estimate import Estimate
from workbench.pipeline.schedules import Action
from workbench.pipeline.simulate import Span, Timeline
from workbench.ui.assets import element
from workbench.ui.number_text import grouped, three_digits
from workbench.ui.pictures import panel_svg
from workbench.ui.planning.memory_picture import memory_html
from workbench.units import format_bytes, format_ranks, format_seconds

_WIDTHS = {"time": 304.0, "timeline": 488.0}
_TIMELINE_LEFT = 60.0
_THINNEST_BOXING = 0.5
_ACTIONS = (
    ("F", "forward", "F forward"),
    ("B", "backward", "B backward"),
    ("I", "backward", "I backward to inputs"),
    ("W", "optimizer-step", "W gradients of weights"),
)
_NOTHING = 1e-6
"""Of a step: a part below it is what rounding leaves."""


@dataclass(frozen=True)
class Prediction:
    """The prediction below the grid.

    Attributes:
        estimate: of the last valid strategy.
        resolved: that strategy.
        before: of the strategy before the last change.
        limit_bytes: memory of one rank; None if unknown.
        is_old: whether the strategy has mistakes, and the estimate is of the last valid one.
        before_label: the name of ``before``.
        note: what the estimate assumes, if the run differs.
    """

    estimate: Estimate
    resolved: ResolvedStrategy
    before: Estimate | None = None
    limit_bytes: float | None = None
    is_old: bool = False
    before_label: str = "before the last change"
    note: str = ""


def predictions_html(prediction: Prediction, ident: str = "live") -> str:
    """Three pictures side by side. ``ident`` keeps the hatching of several copies on one page apart."""
    memory = memory_html(prediction.estimate, prediction.resolved, prediction.limit_bytes)
    sections = (_time(prediction, ident), memory, _timeline(prediction, ident))
    return element("div", *sections, css="wb-predictions old" if prediction.is_old else "wb-predictions")


def no_predictions_html(reason: str) -> str:
    """The reason why there is no prediction, in the place of the pictures."""
    return element("div", element("span", text=reason, css="wb-quiet"), css="wb-predictions none")


def parts_of(estimate: Estimate) -> list[tuple[str, str, float]]:
    """Colour, name and seconds of each part of a step; boxing of activations and of gradients together."""
    parts = (
        ("compute", "compute", estimate.compute_s),
        ("boxing", "boxing", estimate.boxing_s + estimate.gradient_s),
        ("optimizer-step", "optimizer", estimate.optimizer_s),
        ("idle", "bubble", estimate.bubble_s),
    )
    return [part for part in parts if part[-1] > _NOTHING * estimate.step_s]


# ---- seconds ---------------------------------------------------------------------------------------------------------


def _time(prediction: Prediction, ident: str) -> str:
    estimate, before = prediction.estimate, prediction.before
    width = _WIDTHS["time"]
    largest = max(estimate.step_s, before.step_s if before else 0.0) * 1.02
    parts = [
        panel_svg.hatch(ident),
        panel_svg.text(0, 11, "this strategy"),
        panel_svg.text(width, 11, format_seconds(estimate.step_s), "end strong"),
    ]
    parts += _split_bar(estimate, 16, 22, width / largest, ident)
    if before is not None:
        parts += [panel_svg.text(0, 53, prediction.before_label, "quiet")]
        parts += [panel_svg.text(width, 53, format_seconds(before.step_s), "end quiet")]
        parts += _split_bar(before, 58, 11, width / largest, ident)
    parts += panel_svg.axis(0, width, 78, largest, panel_svg.SECONDS)
    named = [(colour, name, format_seconds(seconds)) for colour, name, seconds in parts_of(estimate)]
    summary = f"predicted step time {format_seconds(estimate.step_s)}: "
    summary += ", ".join(f"{name} {time}" for _, name, time in named)
    legend = "".join(
        panel_svg.swatch("idle" if colour == "idle" else f"var(--wb-{colour})", *words) for colour, *words in named
    )
    detail = f"{three_digits(estimate.samples_per_s)} samples/s"
    picture = panel_svg.svg(width, 98, summary, *parts)
    note = [element("div", text=prediction.note, css="wb-quiet")] if prediction.note else []
    return panel_svg.section("Predicted step time", detail, picture, panel_svg.legend(legend), *note, css="time")


def _split_bar(estimate: Estimate, y: float, height: float, scale: float, ident: str) -> list[str]:
    found, x = [], 0.0
    for colour, name, seconds in parts_of(estimate):
        is_idle = colour == "idle"
        fill = f"url(#wb-idle-{ident})" if is_idle else f"var(--wb-{colour})"
        tip = f"{name} {format_seconds(seconds)}, {seconds / estimate.step_s:.0%} of the step"
        if name == "boxing":
            tip += (
                f"\nactivations {format_seconds(estimate.boxing_s)}, gradients {format_seconds(estimate.gradient_s)}"
                f"\n{format_bytes(estimate.boxed_bytes)} sent by all ranks"
            )
        css = "idle" if is_idle else ""
        found.append(panel_svg.bar(x * scale, y, seconds * scale, height, fill, data_tip=tip, css=css))
        x += seconds
    return found


# ---- the pipeline ----------------------------------------------------------------------------------------------------


def _timeline(prediction: Prediction, ident: str) -> str:
    timeline, resolved = prediction.estimate.timeline, prediction.resolved
    has_stages = resolved.degrees[0] > 1
    title = "Simulated pipeline" if has_stages else "Simulated step"
    if timeline is None or not any(timeline.spans):
        num_actions = 2 * resolved.num_stages * resolved.num_micro_batches
        return panel_svg.section(title, f"{grouped(num_actions)} actions, too many to draw", css="timeline")
    width, largest = _WIDTHS["timeline"], timeline.makespan_s or 1.0
    rows = timeline_rows(timeline, resolved, width - _TIMELINE_LEFT, prediction.estimate.boxing_shares)
    step = 28 if len(rows) <= 2 else 22 if len(rows) <= 4 else panel_svg.row_height(len(rows))
    parts = [part for index, row in enumerate(rows) for part in _timeline_row(row, index, len(rows), step, ident)]
    bottom = max(len(rows) * step + 2, 70)
    parts += panel_svg.axis(_TIMELINE_LEFT, width - _TIMELINE_LEFT, bottom, largest, panel_svg.SECONDS)
    num = resolved.options.num_micro_batches
    detail = f"{num} micro-batch{'es' if num > 1 else ''}"
    summary = f"simulated step of {format_seconds(largest)}"
    if has_stages:
        detail = f"{resolved.schedule}, {detail} \u00b7 bubble {timeline.bubble:.0%}"
        summary += f" on {len(rows)} pipeline ranks, bubble {timeline.bubble:.0%}"
    picture = panel_svg.svg(width, bottom + 20, summary, *parts)
    legend = panel_svg.legend(_timeline_legend(rows, has_stages))
    return panel_svg.section(title, detail, picture, legend, css="timeline")


def _timeline_row(row: TimelineRow, index: int, num_rows: int, step: float, ident: str) -> list[str]:
    """A row's label if there is room, its background, and its actions."""
    top, height = index * step, step - 4 if step >= 14 else step - 1
    length, idle = _WIDTHS["timeline"] - _TIMELINE_LEFT, f"url(#wb-idle-{ident})"
    ranks = panel_svg.ranks_of(row.ranks)
    parts = [panel_svg.text(0, top + height / 2 + 4, row.label)] if panel_svg.is_labelled(index, num_rows) else []
    parts.append(panel_svg.bar(_TIMELINE_LEFT, top, length, height, idle, css="area", data_ranks=ranks))
    return [*parts, *(part for action in row.bars for part in _action(action, top, height))]


def _timeline_legend(rows: Sequence[TimelineRow], has_stages: bool) -> str:
    """The legend of the kinds of actions that occur."""
    bars = [bar for row in rows for bar in row.bars]
    kinds = {bar.kind for bar in bars}
    shown = [panel_svg.swatch(f"var(--wb-{colour})", text) for kind, colour, text in _ACTIONS if kind in kinds]
    if any(bar.boxing >= _THINNEST_BOXING for bar in bars):
        shown.append(panel_svg.swatch("var(--wb-boxing)", "boxing"))
    return "".join([*shown, panel_svg.swatch("idle", "idle")] if has_stages else shown)


def _action(action: ActionBar, top: float, height: float) -> list[str]:
    """A forward or backward, with its micro-batch's number, and the sum of its exchanges at its end."""
    left, computing = _TIMELINE_LEFT + action.left, action.width - action.boxing
    colour = next(colour for kind, colour, _ in _ACTIONS if kind == action.kind)
    parts = [panel_svg.bar(left, top, action.width, height, f"var(--wb-{colour})", css="action", data_tip=action.tip)]
    if action.boxing >= _THINNEST_BOXING:
        boxing = panel_svg.bar(left + computing, top, action.boxing, height, "var(--wb-boxing)", css="boxing")
        parts.append(boxing)
    if action.text and height >= 12:
        parts.append(panel_svg.text(left + computing / 2, top + height / 2 + 4, action.text, "on-bar middle"))
    return parts


_ROOM_FOR_A_NUMBER = 14.0
_THINNEST = 1.0
_MAX_BARS = 2000


@dataclass(frozen=True, slots=True)
class ActionBar:
    """One action, or several of a kind that lie within a pixel: place in pixels, number of its micro-batch, tip.

    ``boxing`` pixels of its width are exchanges; they are drawn at its end.
    """

    kind: str
    left: float
    width: float
    text: str
    tip: str
    boxing: float = 0.0


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """The row of one slice of the pipeline axis."""

    label: str
    ranks: tuple[int, ...]
    bars: tuple[ActionBar, ...]


def timeline_rows(
    timeline: Timeline, resolved: ResolvedStrategy, width: float, shares: Sequence[tuple[float, float]] = ()
) -> list[TimelineRow]:
    """A row for every slice of the pipeline axis. The whole step is ``width`` pixels wide.

    Args:
        shares: by stage, the shares of a forward and of a backward that are exchanges. Without it none are drawn.
    """
    starts = [span.start_s for spans in timeline.spans for span in spans]
    start = min(starts, default=0.0)
    scale = width / timeline.makespan_s if timeline.makespan_s else 0.0
    thinnest = 0.0 if len(starts) <= _MAX_BARS else _THINNEST
    rows = []
    for number, spans in enumerate(timeline.spans):
        ranks = tuple(resolved.stage_ranks(number))
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"stage {number}"
        rows.append(TimelineRow(label, ranks, tuple(_bars(spans, start, scale, thinnest, label, ranks, shares))))
    return rows


def _bars(
    spans: Sequence[Span],
    start: float,
    scale: float,
    thinnest: float,
    label: str,
    ranks: Sequence[int],
    shares: Sequence[tuple[float, float]],
) -> list[ActionBar]:
    found: list[ActionBar] = []
    for span in spans:
        left, width = (span.start_s - start) * scale, (span.stop_s - span.start_s) * scale
        last = found[-1] if found else None
        if last is not None and last.width < thinnest and left - (last.left + last.width) < thinnest:
            kind = last.kind if last.kind == span.action.kind else "B"
            found[-1] = ActionBar(kind, last.left, left + width - last.left, "", f"{label}: several actions")
            continue
        share = _share(span.action, shares)
        text = str(span.action.micro_batch) if width * (1 - share) >= _ROOM_FOR_A_NUMBER else ""
        seconds = span.stop_s - span.start_s
        tip = (
            f"{label} (ranks {format_ranks(list(ranks))}): {span.action}, {format_seconds(seconds)}"
            f"\nfrom {format_seconds(span.start_s - start)} to {format_seconds(span.stop_s - start)}"
        )
        tip += f"\nboxing {format_seconds(share * seconds)} of it" if share else ""
        found.append(ActionBar(span.action.kind, left, width, text, tip, width * share))
    return found


def _share(action: Action, shares: Sequence[tuple[float, float]]) -> float:
    """The share of an action that is exchanges. A backward has them in its first half, for which other ranks wait."""
    if not shares or action.kind == "W":
        return 0.0
    forward, backward = shares[action.stage]
    return forward if action.kind == "F" else backward
