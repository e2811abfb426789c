"""What a strategy will take, as pictures: seconds of a step, memory of every rank, the pipeline's timeline.

Pure functions, ``Estimate`` -> HTML with SVG. Colours are the page's variables, so the same text reads in both themes,
in a saved notebook and on paper; no script is needed, and a toggle costs no figure of 5 MB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

from workbench.core.metrics import MEMORY_KINDS
from workbench.core.strategy import ResolvedStrategy
from workbench.cost.estimate import Estimate
from workbench.ui.assets import element
from workbench.ui.numbers import TIMES, grouped
from workbench.ui.timeline_rows import timeline_rows
from workbench.units import format_bytes, format_ranks, format_seconds

MEMORY_LABELS = {"optimizer": "optimizer", "buffers": "boxing buffers"}
PARTS = (("compute", "compute"), ("boxing", "boxing"), ("optimizer_step", "optimizer"), ("bubble", "bubble"))
_WIDTHS = {"time": 304.0, "memory": 304.0, "timeline": 488.0}
_LEFT = 52.0
_MAX_RANK_ROWS = 8
_MAX_LABELLED_ROWS = 16
_OUT_OF_SIGHT = 8
"""A limit so many times above the peak would leave no room for the bars: it is named at the edge instead."""


@dataclass(frozen=True)
class Prediction:
    """What is shown below the grid.

    Attributes:
        estimate: of the last valid strategy.
        resolved: that strategy.
        before: of the strategy before the last change.
        limit_bytes: memory of one rank; None where it is not known.
        machine: its name.
        is_old: the strategy has mistakes, and this is of the one before them.
    """

    estimate: Estimate
    resolved: ResolvedStrategy
    before: Estimate | None = None
    limit_bytes: float | None = None
    machine: str = ""
    is_old: bool = False


def predictions_html(prediction: Prediction, ident: str = "live") -> str:
    """Three pictures side by side. ``ident`` keeps the hatching of several copies on one page apart."""
    sections = (_time(prediction, ident), _memory(prediction), _timeline(prediction, ident))
    return element("div", *sections, css="wb-predictions old" if prediction.is_old else "wb-predictions")


def no_predictions_html(reason: str) -> str:
    """Why there is none, in the pictures' place."""
    return element("div", element("span", text=reason, css="wb-quiet"), css="wb-predictions none")


def parts_of(estimate: Estimate) -> dict[str, float]:
    """Seconds of a step by part; boxing of activations and of gradients together."""
    return {
        "compute": estimate.compute_s,
        "boxing": estimate.boxing_s + estimate.gradient_s,
        "optimizer_step": estimate.optimizer_s,
        "bubble": estimate.bubble_s,
    }


def _section(title: str, detail: str, picture: str, legend: str, css: str) -> str:
    head = element("h4", element("span", text=title), element("span", text=detail, css="wb-quiet"))
    return element("section", head, picture, legend, css=css)


def _svg(width: float, height: float, summary: str, *parts: str) -> str:
    return element(
        "svg", *parts, width=f"{width:.0f}", height=f"{height:.0f}", role="img", aria_label=summary, focusable="false"
    )


def _bar(x: float, y: float, width: float, height: float, colour: str, **attributes: str) -> str:
    size = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{max(width, 0):.1f}", "height": f"{height:.1f}"}
    return element("rect", **size, style=f"fill: {colour}", **attributes)


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return element("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", css=css)


def _text(x: float, y: float, text: str, css: str = "") -> str:
    return element("text", text=text, css=css, x=f"{x:.1f}", y=f"{y:.1f}")


def _hatch(ident: str) -> str:
    """Waiting is striped wherever it appears."""
    stripe = element(
        "path", d="M-1 7L7 -1M5 9L9 5M-1 1L1 -1", style="stroke: var(--wb-idle); stroke-width: 1.2; fill: none"
    )
    pattern = element("pattern", stripe, id=f"wb-idle-{ident}", width="8", height="8", patternUnits="userSpaceOnUse")
    return element("defs", pattern)


def _swatch(colour: str, text: str, value: str = "") -> str:
    parts = [element("i", style=f"background: {colour}") if colour != "idle" else element("i", css="idle")]
    return element("span", *parts, element("span", text=f"{text} {value}".strip()), css="key")


# ---- scales ----------------------------------------------------------------------------------------------------------


def ticks(largest: float, wanted: int = 4) -> list[float]:
    """Round numbers from 0 to ``largest``, about ``wanted`` steps.

    >>> ticks(1.96)
    [0.0, 0.5, 1.0, 1.5]
    """
    if largest <= 0:
        return [0.0]
    rough = largest / wanted
    power = 10.0 ** floor(log10(rough))
    step = next((factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999), 10 * power)
    return [round(step * number, 12) for number in range(floor(largest / step * 1.0001) + 1)]


def scale_of(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The unit in which an axis up to ``largest`` is labelled."""
    return next(((size, name) for size, name in units if largest >= size), units[-1])


_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def _axis(left: float, width: float, y: float, largest: float, units: Sequence[tuple[float, str]]) -> list[str]:
    """A line with ticks; the unit stands behind the last number."""
    size, unit = scale_of(largest, units)
    marks = ticks(largest / size)
    parts = [_line(left, y, left + width, y, "axis")]
    for number, mark in enumerate(marks):
        x = left + width * mark * size / largest
        last = number == len(marks) - 1
        css = "quiet" if not number else "quiet end" if x > left + width - 18 else "quiet middle"
        parts += [_line(x, y, x, y + 3, "axis"), _text(x, y + 16, f"{mark:g}{f' {unit}' if last else ''}", css)]
    return parts


# ---- seconds ---------------------------------------------------------------------------------------------------------


def _time(prediction: Prediction, ident: str) -> str:
    estimate, before = prediction.estimate, prediction.before
    width = _WIDTHS["time"]
    largest = max(estimate.step_s, before.step_s if before else 0.0) * 1.02
    parts = [
        _hatch(ident),
        _text(0, 11, "this strategy"),
        _text(width, 11, format_seconds(estimate.step_s), "end strong"),
    ]
    parts += _split_bar(estimate, 16, 22, width / largest, ident)
    if before is not None:
        parts += [_text(0, 53, "before the last change", "quiet")]
        parts += [_text(width, 53, format_seconds(before.step_s), "end quiet")]
        parts += _split_bar(before, 58, 11, width / largest, ident)
    parts += _axis(0, width, 78, largest, _SECONDS)
    summary = f"predicted step time {format_seconds(estimate.step_s)}: " + ", ".join(
        f"{label} {format_seconds(seconds)}" for label, seconds in _labelled(estimate)
    )
    legend = "".join(
        _swatch("idle" if name == "bubble" else f"var(--wb-{name.replace('_', '-')})", label, format_seconds(seconds))
        for (name, label), seconds in zip(PARTS, parts_of(estimate).values(), strict=True)
        if seconds > 0
    )
    detail = f"{grouped_rate(estimate.samples_per_s)} samples/s"
    return _section("Predicted step time", detail, _svg(width, 98, summary, *parts), _legend(legend), "time")


def grouped_rate(rate: float) -> str:
    """Three digits below a thousand, thousands with a space above."""
    return grouped(rate) if rate >= 1000 else f"{rate:.3g}"


def _labelled(estimate: Estimate) -> list[tuple[str, float]]:
    seconds = parts_of(estimate)
    return [(label, seconds[name]) for name, label in PARTS if seconds[name] > 0]


def _split_bar(estimate: Estimate, y: float, height: float, scale: float, ident: str) -> list[str]:
    found, x = [], 0.0
    for (name, label), seconds in zip(PARTS, parts_of(estimate).values(), strict=True):
        colour = f"url(#wb-idle-{ident})" if name == "bubble" else f"var(--wb-{name.replace('_', '-')})"
        tip = f"{label} {format_seconds(seconds)}, {seconds / estimate.step_s:.0%} of the step"
        if name == "boxing":
            tip += (
                f"\nactivations {format_seconds(estimate.boxing_s)}, gradients {format_seconds(estimate.gradient_s)}"
                f"\n{format_bytes(estimate.boxed_bytes)} sent by all ranks"
            )
        outline = {"css": "idle"} if name == "bubble" else {}
        if seconds > 0:
            found.append(_bar(x * scale, y, seconds * scale, height, colour, data_tip=tip, **outline))
        x += seconds
    return found


def _legend(content: str) -> str:
    return element("div", content, css="legend")


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _memory_rows(prediction: Prediction) -> list[tuple[str, tuple[int, ...], Mapping[str, float]]]:
    """(label, ranks, bytes by kind): a row per rank where there are few, else per stage."""
    resolved, memory = prediction.resolved, prediction.estimate.memory
    grids = list(dict.fromkeys(tuple(resolved.stage_ranks(stage)) for stage in range(resolved.num_stages)))
    pairs = list(zip(grids, memory, strict=False))
    if sum(len(grid) for grid, _ in pairs) <= _MAX_RANK_ROWS:
        return [(f"rank {rank}", (rank,), kinds) for grid, kinds in pairs for rank in grid]
    return [(f"stage {stage}", grid, kinds) for stage, (grid, kinds) in enumerate(pairs)]


def _memory(prediction: Prediction) -> str:
    rows, limit = _memory_rows(prediction), prediction.limit_bytes
    peak = prediction.estimate.peak_bytes
    width = _WIDTHS["memory"]
    in_sight = limit is not None and limit < _OUT_OF_SIGHT * peak
    largest = max(peak * 1.38, limit * 1.04 if in_sight and limit else 0.0, 1.0)
    step = _row_height(len(rows))
    scale = (width - _LEFT) / largest
    height = 16 + step * len(rows)
    parts: list[str] = []
    for index, (label, ranks, kinds) in enumerate(rows):
        parts += _memory_bar(label, ranks, kinds, 16 + index * step, step, scale, limit, _is_labelled(index, rows))
    parts += _axis(_LEFT, width - _LEFT, max(height + 2, 70), largest, _BYTES)
    if limit is not None:
        x = _LEFT + limit * scale if in_sight else width
        text = f"limit {format_bytes(limit)}" + ("" if in_sight else " \u2192")
        over = " strong" if peak > limit else ""
        parts.append(_text(min(x, width), 10, text, f"end limit{over}"))
        parts += [_line(x, 13, x, max(height + 2, 70), "limit")] if in_sight else []
    summary = f"predicted peak memory {format_bytes(peak)} on the fullest rank"
    summary += f" of {format_bytes(limit)}" if limit is not None else ""
    legend = "".join(
        _swatch(f"var(--wb-memory-{kind})", MEMORY_LABELS.get(kind, kind))
        for kind in MEMORY_KINDS
        if any(kinds.get(kind, 0) > 0 for _, _, kinds in rows)
    )
    is_by_rank = rows[0][0].startswith("rank")
    title = "Predicted peak memory per rank" if is_by_rank else "Predicted peak memory"
    detail = "" if is_by_rank else "fullest rank of a stage"
    if limit is not None and peak > limit:
        detail = f"{format_bytes(peak - limit)} too much"
    css = "memory over" if limit is not None and peak > limit else "memory"
    return _section(title, detail, _svg(width, max(height + 2, 70) + 20, summary, *parts), _legend(legend), css)


def _row_height(num_rows: int) -> float:
    return 18 if num_rows <= _MAX_RANK_ROWS else 14 if num_rows <= _MAX_LABELLED_ROWS else max(4, 240 / num_rows)


def _is_labelled(index: int, rows: Sequence[Any]) -> bool:
    """All of few rows have labels; of many, one in so many pixels."""
    every = ceil(14 / _row_height(len(rows)))
    return index % every == 0


def _memory_bar(
    label: str,
    ranks: Sequence[int],
    kinds: Mapping[str, float],
    top: float,
    step: float,
    scale: float,
    limit: float | None,
    is_labelled: bool,
) -> list[str]:
    total = sum(kinds.values())
    height = step - 4 if step >= 14 else step - 1
    lines = [f"{MEMORY_LABELS.get(kind, kind)} {format_bytes(kinds.get(kind, 0))}" for kind in MEMORY_KINDS]
    tip = "\n".join([f"{label} (ranks {format_ranks(list(ranks))}): {format_bytes(total)}", *lines])
    parts, x = [], _LEFT
    for kind in MEMORY_KINDS:
        size = kinds.get(kind, 0.0) * scale
        parts += [_bar(x, top, size, height, f"var(--wb-memory-{kind})")] if size > 0 else []
        x += size
    if is_labelled:
        over = " limit" if limit is not None and total > limit else ""
        middle = top + height / 2 + 4
        parts += [_text(0, middle, label), _text(x + 5, middle, format_bytes(total), f"value{over}")]
    places = _ranks_of(ranks)
    area = _bar(0, top - 1, _WIDTHS["memory"], height + 2, "transparent", css="area", data_tip=tip, data_ranks=places)
    return [*parts, area]


def _ranks_of(ranks: Sequence[int]) -> str:
    """What lights up together with the ranks' column in the grid."""
    return " ".join(map(str, ranks[:64]))


# ---- the pipeline ----------------------------------------------------------------------------------------------------


def _timeline(prediction: Prediction, ident: str) -> str:
    timeline, resolved = prediction.estimate.timeline, prediction.resolved
    options = resolved.options
    title = "Simulated pipeline" if resolved.degrees[0] > 1 else "Simulated step"
    if timeline is None or not any(timeline.spans):
        num_actions = 2 * resolved.num_stages * resolved.num_micro_batches
        return _section(title, f"{grouped(num_actions)} actions, too many to draw", "", "", "timeline")
    width = _WIDTHS["timeline"]
    rows = timeline_rows(timeline, resolved, width - 60)
    step = _row_height(len(rows))
    step = 28 if len(rows) <= 2 else 22 if len(rows) <= 4 else step
    largest = timeline.makespan_s or 1.0
    parts: list[str] = []
    for index, row in enumerate(rows):
        top = index * step
        height = step - 4 if step >= 14 else step - 1
        if _is_labelled(index, rows):
            parts.append(_text(0, top + height / 2 + 4, row.label))
        idle = f"url(#wb-idle-{ident})"
        parts.append(_bar(60, top, width - 60, height, idle, css="area", data_ranks=_ranks_of(row.ranks)))
        for bar in row.bars:
            colour = {"F": "forward", "W": "optimizer-step"}.get(bar.kind, "backward")
            parts.append(
                _bar(60 + bar.left, top, bar.width, height, f"var(--wb-{colour})", css="action", data_tip=bar.tip)
            )
            if bar.text and height >= 12:
                parts.append(_text(60 + bar.left + bar.width / 2, top + height / 2 + 4, bar.text, "on-bar middle"))
    bottom = max(len(rows) * step + 2, 70)
    parts += _axis(60, width - 60, bottom, largest, _SECONDS)
    bubble = f"bubble {timeline.bubble:.0%}" if resolved.degrees[0] > 1 else "no pipeline"
    num = options.num_micro_batches
    detail = f"{resolved.schedule}, {num} micro-batch{'es' if num > 1 else ''}, one step \u00b7 {bubble}"
    summary = f"simulated step of {format_seconds(largest)} on {len(rows)} pipeline ranks, {bubble}"
    kinds = {bar.kind for row in rows for bar in row.bars}
    names = (("F", "forward", "F forward"), ("B", "backward", "B backward"), ("I", "backward", "I backward to inputs"))
    legend = "".join(_swatch(f"var(--wb-{colour})", text) for kind, colour, text in names if kind in kinds)
    legend += _swatch("var(--wb-optimizer-step)", "W gradients of weights") if "W" in kinds else ""
    legend += _swatch("idle", "idle") if resolved.degrees[0] > 1 else ""
    return _section(title, detail, _svg(width, bottom + 20, summary, *parts), _legend(legend), "timeline")


def change_text(before: Estimate | None, now: Estimate) -> str:
    """What the last change did to the step: ``"6% faster"``."""
    if before is None or not before.step_s:
        return ""
    ratio = now.step_s / before.step_s
    if abs(ratio - 1) < 0.005:
        return "as fast as before"
    return (
        f"{1 - ratio:.0%} less time"
        if ratio < 1
        else f"{TIMES}{ratio:.2f} the time"
        if ratio > 2
        else f"{ratio - 1:.0%} more time"
    )
