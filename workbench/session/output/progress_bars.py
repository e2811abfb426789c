"""Merges the progress bars of several ranks into one: the slowest rank's, with the other ranks' counts beside it.

Pure functions.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.session import protocol
from workbench.session.ranks import describe_ranks

#: How often bars are drawn again.
PERIOD_S = 0.1
#: The number of ended bars that are shown: the last ones.
MAX_ENDED = 10
_COLOURS = {
    "runs": "var(--jp-brand-color1, #0a6cb8)",
    "finished": "var(--jp-success-color1, #2e7d32)",
    "left": "var(--jp-ui-font-color2, #757575)",
    "failed": "var(--jp-error-color1, #c62828)",
}
_MARKS = {"failed": " \u2717", "left": " (left early)"}


@dataclass(frozen=True, slots=True)
class MergedBar:
    """One bar of a cell, for all ranks that have it."""

    left: str
    right: str
    fraction: float | None  #: of the total; None where there is no total
    depth: int
    state: str


class Bars:
    """The bars of a run. Bars of several ranks with the same number and name are one bar."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._bars: dict[tuple[int, str], dict[int, protocol.Bar]] = {}
        self._shown_s, self._has_changed = -PERIOD_S, False

    def take(self, rank: int, bar: protocol.Bar) -> None:
        of_ranks = self._bars.setdefault((bar.number, bar.name), {})
        of_ranks.pop(rank, None)
        of_ranks[rank] = bar  # in the order in which they came
        self._has_changed = True

    def due(self, now: float, final: bool = False) -> list[MergedBar] | None:
        """The bars to draw instead of the last ones; None if nothing has to change."""
        if not self._has_changed or (now < self._shown_s + PERIOD_S and not final):
            return None
        self._has_changed, self._shown_s = False, now
        return self.merged()

    def wakeup(self) -> float | None:
        return self._shown_s + PERIOD_S if self._has_changed else None

    def merged(self) -> list[MergedBar]:
        """The bars in the order in which they began. If many have ended, the first ones are only counted."""
        found = [_merge(self._bars[key], self._ranks) for key in sorted(self._bars)]
        found = [bar for bar in found if bar.state != "gone"]
        ended = [bar for bar in found if bar.state == "finished"]
        hidden = {id(bar) for bar in ended[:-MAX_ENDED]}
        kept = [bar for bar in found if id(bar) not in hidden]
        note = MergedBar("", f"{len(hidden)} more bars, finished", 1.0, 0, "finished")
        return [note, *kept] if hidden else kept


def _merge(bars: dict[int, protocol.Bar], ranks: Sequence[int]) -> MergedBar:
    newest_first = list(reversed(bars))  # among ranks with equal counts, the one that reached it last
    slowest = min(newest_first, key=lambda rank: (_fraction(bars[rank]) or 0.0, bars[rank].done))
    bar, right = bars[slowest], bars[slowest].right
    done: dict[float, list[int]] = {}
    for rank in sorted(bars):
        done.setdefault(bars[rank].done, []).append(rank)
    others = [f"{describe_ranks(those)}: {count:g}" for count, those in sorted(done.items()) if count != bar.done]
    if others:
        right = f"{right}  ({describe_ranks(done[bar.done])}; {', '.join(others)})"
    elif len(bars) < len(ranks):
        right = f"{right}  ({describe_ranks(bars)})"
    states = {each.state for each in bars.values()}
    state = next(each for each in ("failed", "runs", "left", "finished", "gone") if each in states)
    return MergedBar(bar.left, right, _fraction(bar), bar.depth, state)


def _fraction(bar: protocol.Bar) -> float | None:
    return min(1.0, bar.done / bar.total) if bar.total else None


def as_text(bars: Sequence[MergedBar]) -> str:
    """The bars for a terminal or a file."""
    return "\n".join(map(_line, bars))


def _line(bar: MergedBar) -> str:
    filled = round(20 * (1.0 if bar.fraction is None else bar.fraction))
    drawn = f"|{'█' * filled}{' ' * (20 - filled)}|"
    return f"{'  ' * bar.depth}{bar.left}{drawn}{bar.right}{_MARKS.get(bar.state, '')}"


def as_html(bars: Sequence[MergedBar]) -> str:
    """The bars for a notebook. They need no widgets, and a saved notebook keeps them."""
    return f"<div>{''.join(map(_row, bars))}</div>" if bars else ""


def _row(bar: MergedBar) -> str:
    colour = _COLOURS[bar.state]
    percent = 100.0 * (1.0 if bar.fraction is None else bar.fraction)
    name, right = html.escape(bar.left), html.escape(bar.right + _MARKS.get(bar.state, ""))
    value = f' aria-valuenow="{percent:.0f}"' if bar.fraction is not None else ""
    return (
        f'<div data-state="{bar.state}" style="display:flex;align-items:center;gap:8px;margin:2px 0 2px '
        f"{16 * bar.depth}px;font-family:var(--jp-code-font-family,monospace);"
        f'font-size:var(--jp-code-font-size,13px);white-space:pre">'
        f"<span>{name}</span>"
        f'<span role="progressbar"{value} aria-label="{name.strip()}" style="flex:0 1 320px;min-width:80px;height:12px;'
        f'border-radius:3px;overflow:hidden;background:var(--jp-layout-color3,#e0e0e0)">'
        f'<span style="display:block;height:100%;width:{percent:.1f}%;background:{colour}"></span></span>'
        f'<span style="overflow:hidden;text-overflow:ellipsis">{right}</span></div>'
    )
