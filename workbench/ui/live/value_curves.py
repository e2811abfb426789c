"""Values of a run beside its loss as small curves: learning rate, gradient norm, tokens per second, and users' own.

Colours are style-sheet variables (``theme.style_sheet``), so they read in both themes, and without a kernel.
"""

from __future__ import annotations

from html import escape

import numpy as np

from workbench.ui.assets import element
from workbench.ui.decimate import decimate
from workbench.ui.live.history import History

_WIDTH, _HEIGHT = 150, 34
_MOST_POINTS = 150
MOST_CURVES = 32


def value_curves(history: History) -> str:
    """A name, the latest value and a curve over the steps for each; empty if the run has no values.

    >>> from workbench.core.metrics import StepBlock
    >>> history = History(10, 1)
    >>> history.add([StepBlock(0, (64,), (None,), ((0.5,),), ((0.0,),), ((0,),), values={"accuracy": ((0, 0.75),)})])
    >>> "accuracy <b>0.75</b>" in value_curves(history)
    True
    """
    names = list(history.values)
    cards = [_card(name, history, max(history.last_step, 2)) for name in names[:MOST_CURVES]]
    more = f"{len(names) - MOST_CURVES} more values are in the run's record" if len(names) > MOST_CURVES else ""
    rest = [element("span", text=more, css="wb-quiet")] if more else []
    style = "display:flex;flex-wrap:wrap;gap:8px 24px;padding:8px 12px"
    return element("div", *cards, *rest, css="wb-values", style=style) if cards else ""


def _card(name: str, history: History, last_step: int) -> str:
    latest = element("b", text=f"{history.latest_values[name]:.4g}")
    words = element("div", f"{escape(name.replace('_', ' '))} {latest}")
    return element("div", words, _curve(*history.values[name].points, last_step))


def _curve(steps: np.ndarray, values: np.ndarray, last_step: int) -> str:
    """A curve, from the smallest to the largest value; a dot where there is only one."""
    is_finite = np.isfinite(values)
    steps, values = decimate(steps[is_finite], values[is_finite], _MOST_POINTS)
    if not len(values):
        return ""
    low, high = float(values.min()), float(values.max())
    x = 2 + (_WIDTH - 4) * (steps - 1) / max(1, last_step - 1)
    y = _HEIGHT / 2 + 0 * x if high == low else 3 + (_HEIGHT - 6) * (high - values) / (high - low)
    points = " ".join(f"{at:.1f},{level:.1f}" for at, level in zip(x, y, strict=True))
    line = element("polyline", points=points, fill="none", stroke="var(--wb-ink)", stroke_width="1.5")
    dot = element("circle", cx=f"{x[-1]:.1f}", cy=f"{y[-1]:.1f}", r="2", fill="var(--wb-ink)")
    title = element("title", text=f"from {low:.4g} to {high:.4g}")
    return element("svg", title, line, dot, width=str(_WIDTH), height=str(_HEIGHT))
