"""What tests ask of the live figure."""

from __future__ import annotations

import plotly.graph_objects as go

MEMORY = ({"parameters": 2_000_000, "peak": 4_000_000},) * 2


def trace(figure: go.Figure, name: str) -> go.Scatter:
    return next(trace for trace in figure.data if trace.name == name)


def titles(figure: go.Figure) -> list[str]:
    return [annotation.text for annotation in figure.layout.annotations[:5]]


def marks(figure: go.Figure, kind: str, name: str) -> list[object]:
    return [each for each in figure.layout[kind] if each.name == name]
