"""SVG shapes of the panel's pictures: bars, lines, text and axes. Their colours are variables of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from workbench.ui.assets import element

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
FEW_ROWS = 8
_STEPS = 4
"""Between the numbers beside an axis, about."""
_MAX_LABELLED_ROWS = 16


def section(title: str, detail: str, *parts: str, css: str = "") -> str:
    """A title with a quiet detail, and what it is the title of: a picture and its legend."""
    head = element("h4", element("span", text=title), element("span", text=detail, css="wb-quiet"))
    return element("section", head, *parts, css=css)


def svg(width: float, height: float, summary: str, *parts: str) -> str:
    """A picture. ``summary`` is its description for screen readers, one sentence."""
    return element(
        "svg",
        *parts,
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        style=f"width: {width:.0f}px; height: {height:.0f}px; max-width: none",  # notebooks shrink pictures otherwise
        role="img",
        aria_label=summary,
        focusable="false",
    )


def bar(x: float, y: float, width: float, height: float, colour: str, **attributes: str) -> str:
    """A filled rectangle."""
    size = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{max(width, 0):.1f}", "height": f"{height:.1f}"}
    return element("rect", **size, style=f"fill: {colour}", **attributes)


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """A line."""
    return element("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", css=css)


def text(x: float, y: float, text: str, css: str = "") -> str:
    """Text at a place; ``css`` says how it is aligned."""
    return element("text", text=text, css=css, x=f"{x:.1f}", y=f"{y:.1f}")


def hatch(ident: str) -> str:
    """The striped pattern of waiting time, under the id ``ident``."""
    stripe = element(
        "path", d="M-1 7L7 -1M5 9L9 5M-1 1L1 -1", style="stroke: var(--wb-idle); stroke-width: 1.2; fill: none"
    )
    pattern = element("pattern", stripe, id=f"wb-idle-{ident}", width="8", height="8", patternUnits="userSpaceOnUse")
    return element("defs", pattern)


def swatch(colour: str, text: str, value: str = "") -> str:
    """A square of a colour and its meaning."""
    parts = [element("i", style=f"background: {colour}") if colour != "idle" else element("i", css="idle")]
    return element("span", *parts, element("span", text=f"{text} {value}".strip()), css="key")


# ---- scales ----------------------------------------------------------------------------------------------------------


def span(low: float, high: float) -> float:
    """``high - low`` for an axis. Of numbers that hardly differ it is their size: labels have six digits.

    >>> span(1.0, 3.0), span(-2.0, -2.0)
    (2.0, 2.0)
    """
    size = max(abs(low), abs(high)) or 1.0
    return high - low if high - low > 1e-5 * size else size


@dataclass(frozen=True, slots=True)
class Axis:
    """Numbers from ``low`` to ``high`` along pixels from ``start`` to ``end``.

    >>> Axis(0.0, 1.96, 40.0, 338.0).ticks()
    [0.0, 0.5, 1.0, 1.5]
    """

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """The axis for these numbers. It begins at zero, unless that leaves its lower half empty."""
        least, most = min(values), max(values) or 1.0
        low = 0.0 if least < most / 2 else least - 0.25 * span(least, most)
        return cls(low, most + 0.1 * (most - low), start, end)

    def at(self, value: float) -> float:
        """The pixel of a number."""
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers in between."""
        rough = (self.high - self.low) / _STEPS
        exponent = floor(log10(rough))
        power = 10.0**exponent
        step = next((factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999), 10 * power)
        numbers = range(ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9) + 1)
        return [round(step * number, 1 - exponent) for number in numbers]


class LogAxis(Axis):
    """Numbers from ``10**low`` to ``10**high``, by their logarithm, along pixels from ``start`` to ``end``."""

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> LogAxis:
        """The axis of whole powers of ten around these numbers."""
        low = floor(log10(min(values)))
        return cls(low, max(ceil(log10(max(values))), low + 1), start, end)

    def at(self, value: float) -> float:
        """The pixel of a number."""
        return super().at(log10(value))

    def ticks(self) -> list[float]:
        """Powers of ten in between."""
        powers = range(int(self.low), int(self.high) + 1, ceil((self.high - self.low) / _STEPS))
        return [10.0**power for power in powers]


def scale_of(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The unit in which an axis up to ``largest`` is labelled."""
    return next(((size, name) for size, name in units if largest >= size), units[-1])


def axis(left: float, width: float, y: float, largest: float, units: Sequence[tuple[float, str]]) -> list[str]:
    """A line with ticks; the unit stands behind the last number."""
    size, unit = scale_of(largest, units)
    scale = Axis(0.0, largest / size, left, left + width)
    marks = scale.ticks()
    parts = [line(left, y, left + width, y, "axis")]
    for number, mark in enumerate(marks):
        x = scale.at(mark)
        last = number == len(marks) - 1
        css = "quiet" if not number else "quiet end" if x > left + width - 18 else "quiet middle"
        parts += [line(x, y, x, y + 3, "axis"), text(x, y + 16, f"{mark:g}{f' {unit}' if last else ''}", css)]
    return parts


def frame(
    across: Axis,
    up: Axis,
    names: tuple[str, str],
    write_across: Callable[[float], str],
    write_up: Callable[[float], str],
) -> list[str]:
    """The rules, the numbers and the names of two axes. A number that is written as ``""`` is left out."""
    left, right, bottom = across.start, across.end, up.start
    parts = [text(right, bottom + 32, names[0], "quiet end"), text(0, 12, names[1], "quiet")]
    for mark in up.ticks():
        y = up.at(mark)
        parts += [line(left, y, right, y, "rule"), text(left - 6, y + 4, write_up(mark), "quiet end")]
    for mark in across.ticks():
        words = write_across(mark)
        parts += [text(across.at(mark), bottom + 16, words, "quiet middle")] if words else []
    return [*parts, line(left, bottom, right, bottom, "axis")]


def legend(content: str) -> str:
    """The line below a picture."""
    return element("div", content, css="legend")


# ---- rows -----------------------------------------------------------------------------------------------------------


def row_height(num_rows: int) -> float:
    """Pixels of a row: 18 up to 8, then less, so that all of them stay within 240."""
    return 18 if num_rows <= FEW_ROWS else 14 if num_rows <= _MAX_LABELLED_ROWS else max(4, 240 / num_rows)


def is_labelled(index: int, num_rows: int) -> bool:
    """Whether a row has a label. All rows have one, unless labels would then overlap."""
    return index % ceil(14 / row_height(num_rows)) == 0


def ranks_of(ranks: Sequence[int]) -> str:
    """Ranks as an attribute of a shape: the page highlights the shape together with the ranks' column in the grid."""
    return " ".join(map(str, ranks[:64]))
