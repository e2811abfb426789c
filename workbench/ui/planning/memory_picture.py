"""Predicted memory as a picture: for few ranks a bar by kind for each, else one cell per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from workbench.core.metrics import MEMORY_KINDS, MEMORY_LABELS
from workbench.core.strategy import ResolvedStrategy
from workbench.cost.estimate import Estimate
from workbench.ui.pictures import panel_svg
from workbench.units import format_bytes, format_ranks

WIDTH = 304.0
_LEFT = 52.0
_RIGHT = 74.0
"""Room behind the cells for the largest number of their row."""
_WIDEST_CELL, _NARROWEST_CELL, _CELL_HEIGHT = 11.0, 2.0, 14.0
_MOST_ROWS = 6
_OUT_OF_SIGHT = 8
"""A limit so many times above the peak would leave no room for the bars: it is named at the edge instead."""

Stage = tuple[Sequence[int], Mapping[str, float]]
"""Its ranks, and bytes by kind of the fullest of them."""


def memory_html(estimate: Estimate, resolved: ResolvedStrategy, limit_bytes: float | None) -> str:
    """The section with title, picture and legend."""
    grids = list(dict.fromkeys(tuple(resolved.stage_ranks(stage)) for stage in range(resolved.num_stages)))
    stages: list[Stage] = list(zip(grids, estimate.memory, strict=False))
    peak = estimate.peak_bytes
    too_much = limit_bytes is not None and peak > limit_bytes
    detail = f"{format_bytes(peak - (limit_bytes or 0))} too much" if too_much else ""
    summary = f"predicted peak memory {format_bytes(peak)} on the fullest rank"
    summary += f" of {format_bytes(limit_bytes)}" if limit_bytes is not None else ""
    legend = "".join(
        panel_svg.swatch(f"var(--wb-memory-{kind})", MEMORY_LABELS[kind])
        for kind in MEMORY_KINDS
        if any(kinds.get(kind, 0) > 0 for _, kinds in stages)
    )
    if sum(len(ranks) for ranks, _ in stages) <= panel_svg.FEW_ROWS:
        title, height, parts = "Predicted peak memory per rank", *_bars(stages, peak, limit_bytes)
    else:
        title, height, parts = "Predicted peak memory", *_cells(stages, peak, limit_bytes)
        detail = detail or (f"of {format_bytes(limit_bytes)}" if limit_bytes is not None else "")
    if estimate.offloaded_bytes:
        beside = f"{format_bytes(estimate.offloaded_bytes)} offloaded"
        detail, summary = f"{detail}, {beside}" if detail else beside, f"{summary}, {beside} beside it"
    css = "memory over" if too_much else "memory"
    picture = panel_svg.svg(WIDTH, height, summary, *parts)
    return panel_svg.section(title, detail, picture, panel_svg.legend(legend), css=css)


# ---- few ranks: a bar each -------------------------------------------------------------------------------------------


def _bars(stages: Sequence[Stage], peak: float, limit: float | None) -> tuple[float, list[str]]:
    rows = [(rank, kinds) for ranks, kinds in stages for rank in ranks]
    in_sight = limit is not None and limit < _OUT_OF_SIGHT * peak
    largest = max(peak * 1.38, limit * 1.04 if in_sight and limit else 0.0, 1.0)
    step = panel_svg.row_height(len(rows))
    bottom = max(18 + step * len(rows), 70)
    scale = (WIDTH - _LEFT) / largest
    parts: list[str] = []
    for index, (rank, kinds) in enumerate(rows):
        parts += _labelled_bar(f"rank {rank}", (rank,), kinds, 16 + index * step, step - 4, scale, limit)
    parts += panel_svg.axis(_LEFT, WIDTH - _LEFT, bottom, largest, panel_svg.BYTES)
    if limit is not None:
        x = _LEFT + limit * scale if in_sight else WIDTH
        description = f"limit {format_bytes(limit)}" + ("" if in_sight else " \u2192")
        parts.append(panel_svg.text(min(x, WIDTH), 10, description, f"end limit{' strong' if peak > limit else ''}"))
        parts += [panel_svg.line(x, 13, x, bottom, "limit")] if in_sight else []
    return bottom + 20, parts


def _labelled_bar(
    label: str,
    ranks: Sequence[int],
    kinds: Mapping[str, float],
    top: float,
    height: float,
    scale: float,
    limit: float | None,
) -> list[str]:
    total, x = sum(kinds.values()), _LEFT
    parts = []
    for kind in MEMORY_KINDS:
        size = kinds.get(kind, 0.0) * scale
        parts += [panel_svg.bar(x, top, size, height, f"var(--wb-memory-{kind})")] if size > 0 else []
        x += size
    over = " limit" if limit is not None and total > limit else ""
    middle = top + height / 2 + 4
    parts += [panel_svg.text(0, middle, label), panel_svg.text(x + 5, middle, format_bytes(total), f"value{over}")]
    area = {"css": "area", "data_tip": _tip(label, ranks, kinds), "data_ranks": panel_svg.ranks_of(ranks)}
    return [*parts, panel_svg.bar(0, top - 1, WIDTH, height + 2, "transparent", **area)]


def _tip(label: str, ranks: Sequence[int], kinds: Mapping[str, float]) -> str:
    lines = [f"{MEMORY_LABELS[kind]} {format_bytes(kinds.get(kind, 0))}" for kind in MEMORY_KINDS]
    where = "" if len(ranks) == 1 else f" (ranks {format_ranks(list(ranks))})"
    return "\n".join([f"{label}{where}: {format_bytes(sum(kinds.values()))} on each rank", *lines])


# ---- many ranks: a cell each -----------------------------------------------------------------------------------------


def _cells(stages: Sequence[Stage], peak: float, limit: float | None) -> tuple[float, list[str]]:
    """Rows of cells whose shade shows their bytes, and below them the fullest rank as a bar by kind."""
    per_row = ceil(len(stages) / _MOST_ROWS)
    rows = [list(range(first, min(first + per_row, len(stages)))) for first in range(0, len(stages), per_row)]
    longest = max(sum(len(stages[stage][0]) for stage in row) for row in rows)
    room = WIDTH - _LEFT - _RIGHT
    ranks_per_cell = ceil(longest * _NARROWEST_CELL / room)
    width = min(_WIDEST_CELL, room / ceil(longest / ranks_per_cell))
    parts: list[str] = []
    for index, row in enumerate(rows):
        parts += _row_of_cells(row, stages, index * (_CELL_HEIGHT + 4), width, ranks_per_cell, peak, limit)
    bottom = len(rows) * (_CELL_HEIGHT + 4)
    each = "one cell per rank" if ranks_per_cell == 1 else f"one cell per {ranks_per_cell} ranks"
    parts.append(panel_svg.text(_LEFT, bottom + 10, f"{each}, darker is fuller", "quiet"))
    ranks, kinds = max(stages, key=lambda stage: sum(stage[1].values()))
    scale = (WIDTH - _LEFT - _RIGHT) / (peak or 1.0)
    parts += _labelled_bar("fullest", ranks, kinds, bottom + 20, _CELL_HEIGHT, scale, limit)
    return bottom + 40, parts


def _row_of_cells(
    row: Sequence[int],
    stages: Sequence[Stage],
    top: float,
    width: float,
    ranks_per_cell: int,
    peak: float,
    limit: float | None,
) -> list[str]:
    label = f"stage {row[0]}" if len(row) == 1 else f"st. {row[0]}-{row[-1]}"
    parts, x, largest = [panel_svg.text(0, top + 11, label)], _LEFT, 0.0
    for number in row:
        ranks, kinds = stages[number]
        total = sum(kinds.values())
        largest = max(largest, total)
        role = "error" if limit is not None and total > limit else "memory-parameters"
        share = f"{15 + 85 * total / (peak or 1.0):.0f}%"
        colour = f"color-mix(in srgb, var(--wb-{role}) {share}, var(--wb-background))"
        for first in range(0, len(ranks), ranks_per_cell):
            mine = ranks[first : first + ranks_per_cell]
            tip, hot = _tip(f"stage {number}", ranks, kinds), panel_svg.ranks_of(mine)
            area = {"css": "area", "data_tip": tip, "data_ranks": hot}
            parts.append(panel_svg.bar(x, top, max(width - 1, 1.5), _CELL_HEIGHT, colour, **area))
            x += width
    over = " limit" if limit is not None and largest > limit else ""
    description = format_bytes(largest) if len(row) == 1 else f"max {format_bytes(largest)}"
    return [*parts, panel_svg.text(x + 5, top + 11, description, f"value{over}")]
