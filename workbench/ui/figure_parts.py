"""Settings that the live figure and the figures of sweeps share: axes, layout, colours and marks in one look."""

from __future__ import annotations

from typing import Any

from workbench.theme import UI_FONT, Palette

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")


def run_colour(colours: Palette, index: int) -> str:
    """Colour of the ``index``-th run of a comparison: first shades of all hues, then second shades."""
    shade, hue = divmod(index, len(colours.stages))
    return colours.stages[hue].shades[shade % 2]


def run_symbol(index: int) -> str:
    """Marker of the ``index``-th run, so that colour is never the only difference."""
    return _SYMBOLS[index % len(_SYMBOLS)]


def axis(colours: Palette, title: str, **more: Any) -> dict[str, Any]:
    """One axis: title with unit, light grid, no zero line, never zoomed by accident."""
    settings = {
        "title": {"text": title, "font": {"size": 12, "color": colours.muted}, "standoff": 6},
        "tickfont": {"size": 12, "color": colours.muted},
        "gridcolor": colours.line,
        "linecolor": colours.strong_line,
        "zeroline": False,
        "automargin": True,
        "ticks": "",
    }
    return settings | more


def titled(name: str, detail: str, colours: Palette) -> str:
    """A bold name and a quiet detail."""
    return f"<b>{name}</b>" + (f' <span style="font-size:12px;color:{colours.muted}">{detail}</span>' if detail else "")


def base_layout(colours: Palette, title: str, detail: str = "", **more: Any) -> dict[str, Any]:
    """Layout shared by all figures: transparent ground, left title with a quiet second part, no animation."""
    settings = {
        "title": {
            "text": titled(title, detail, colours),
            "font": {"size": 13},
            "x": 0,
            "xref": "paper",
            "y": 1,
            "yref": "container",
            "pad": {"t": 12},
            "yanchor": "top",
        },
        "font": {"family": UI_FONT, "size": 12, "color": colours.ink},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 56, "r": 20, "t": 44, "b": 48},
        "legend": legend(colours),
        "hoverlabel": {"bgcolor": colours.background, "font": {"color": colours.ink, "size": 12}},
        "height": 320,
        "template": "none",
    }
    return settings | more


def legend(colours: Palette, **more: Any) -> dict[str, Any]:
    """A horizontal legend under the plot, so that it never covers data."""
    place = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "xanchor": "left", "traceorder": "normal"}
    return place | {"font": {"size": 12, "color": colours.ink}, "bgcolor": "rgba(0,0,0,0)"} | more
