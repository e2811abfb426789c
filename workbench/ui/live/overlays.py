"""Overlays of the live figure: changes of the strategy, a pause, the memory limit, the ranks' colours.

Each ``show`` function replaces its own earlier drawing only.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from workbench.theme import LIGHT, Palette
from workbench.ui.live import figure_layout as figure_layout
from workbench.ui.live.figure_layout import limit_text, shown_ranks
from workbench.ui.live.history import Change
from workbench.ui.short_names import short_name

_CURVES = (("x", "y domain"), ("x2", "y2 domain"))
_SWATCH_LEFT, _SWATCH_WIDTH, _SWATCH_HEIGHT = 12, 10, 26


def show_changes(figure: go.Figure, changes: Sequence[Change], colours: Palette = LIGHT) -> None:
    """A vertical line in both curves where the strategy changed; the last one between the names of the two."""
    line = {"color": colours.ink, "width": 1}
    lines = [
        {"type": "line", "line": line, "x0": change.step, "x1": change.step, "y0": 0, "y1": 1, "xref": x, "yref": y}
        for change in changes
        for x, y in _CURVES
    ]
    notes = [note for change in changes[-1:] for note in _names_of(change, figure.layout.xaxis.range[1], colours)]
    _replace(figure, "change", lines, notes)


def _names_of(change: Change, end: float, colours: Palette) -> list[dict[str, Any]]:
    """The names of both strategies beside the line; both on one side if the other has no room."""
    before, after = (short_name(name, 8, 7) for name in (change.before, change.after))
    both, share = f"{before} \u2192 {after}", change.step / max(end, 1)
    if share < 0.3:
        return [_beside(change.step, both, "left", colours)]
    if share > 0.7:
        return [_beside(change.step, both, "right", colours)]
    return [
        _beside(change.step, before, "right", colours),
        _beside(change.step, after, "left", colours),
    ]


def _beside(step: float, name: str, anchor: str, colours: Palette) -> dict[str, Any]:
    shift = 4 if anchor == "left" else -4
    place = {"x": step, "xshift": shift, "y": 0.04, "xref": "x", "yref": "y domain", "xanchor": anchor}
    return place | {"text": escape(name), "yanchor": "bottom"} | _on_ground(colours)


def show_pause(figure: go.Figure, is_paused: bool, colours: Palette = LIGHT) -> None:
    """ "paused" across the top of both curves."""
    place = {"x": 0.5, "y": 1, "yanchor": "top", "text": "<b>paused</b>"}
    notes = [
        place | {"xref": f"{x} domain", "yref": y, "bordercolor": colours.strong_line} | _on_ground(colours)
        for x, y in _CURVES
    ]
    _replace(figure, "pause", [], notes if is_paused else [])


def show_limit(
    figure: go.Figure, limit: float | None, limit_bytes: float | None, machine: str = "", colours: Palette = LIGHT
) -> None:
    """The memory of a rank: a line in the memory pane, or its number at the edge if it is too far away.

    Args:
        limit: its place in the axis's unit; None: too far away.
        limit_bytes: the limit; None if unknown.
        machine: the name of the machine that has it, which need not be that of the run.
    """
    lines, words = [], escape(limit_text(limit_bytes or 0, machine))
    note = {"y": 1, "yref": "y3 domain", "xanchor": "right", "yanchor": "bottom", "showarrow": False}
    note |= {"font": {"size": 12, "color": colours.error}}
    if limit is None:
        note |= {"x": 1, "xref": "x3 domain", "text": f"{words} \u2192"}
    else:
        note |= {"x": limit, "xref": "x3", "text": words}
        place = {"x0": limit, "x1": limit, "y0": 0, "y1": 1, "xref": "x3", "yref": "y3 domain"}
        lines.append({"type": "line", "line": {"color": colours.error, "width": 1.5}, **place})
    _replace(figure, "limit", lines, [note] if limit_bytes else [])


def show_stages(figure: go.Figure, places: Sequence[tuple[int, int]], colours: Palette = LIGHT) -> None:
    """A swatch in its rank's colour before every row of the timeline. ``places``: by rank, stage and number there."""
    full, width = figure.layout.height, figure.layout.width
    swatches = []
    for row, rank in enumerate(shown_ranks(len(places))):
        top = figure_layout.Frame(width).timeline_top + figure_layout.ROW * row + 4
        box = {
            "x0": _SWATCH_LEFT / width,
            "x1": (_SWATCH_LEFT + _SWATCH_WIDTH) / width,
            "y0": 1 - top / full,
            "y1": 1 - (top + _SWATCH_HEIGHT) / full,
        }
        look = {"fillcolor": colours.rank_colour(*places[rank]), "line": {"width": 0}}
        swatches.append({"type": "rect", "xref": "paper", "yref": "paper", **box, **look})
    _replace(figure, "stages", swatches, [])


def _on_ground(colours: Palette) -> dict[str, Any]:
    font = {"size": 12, "color": colours.ink}
    return {"showarrow": False, "font": font, "bgcolor": colours.background, "borderpad": 2, "opacity": 0.9}


def _replace(figure: go.Figure, name: str, shapes: list[dict[str, Any]], notes: list[dict[str, Any]]) -> None:
    """Replace the shapes and annotations of a name; equal ones are not sent again."""
    layout = figure.layout
    for kind, new in (("shapes", shapes), ("annotations", notes)):
        old = [each for each in layout[kind] if each.name == name]
        if [each.to_plotly_json() for each in old] != [{"name": name, **each} for each in new]:
            layout[kind] = [*(each for each in layout[kind] if each.name != name), *({"name": name, **n} for n in new)]
