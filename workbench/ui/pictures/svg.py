"""SVG shapes, and ``Picture``, which a notebook displays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from workbench.theme import CODE_FONT, UI_FONT, Palette

_LETTER = {"ui": 0.56, "code": 0.61}
"""Average width of a letter, in font sizes. Fonts differ, so texts get room."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on the page."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        """Its centre."""
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing and its description in words. A notebook shows the drawing of a cell's last line, plain or
    ``%%global``.

    All ranks draw the same picture of the same tensors, so it appears once.
    """

    svg: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.text}

    def save(self, path: str | Path) -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")


def document(size: tuple[float, float], title: str, colours: Palette, parts: Iterable[str]) -> str:
    """An SVG page of this width and height on the palette's background."""
    width, height = size
    sizes = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    font = f'font-family="{escape(UI_FONT)}" font-size="12" fill="{colours.ink}"'
    stripes = (
        f'<pattern id="term-{colours.name}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="2.6" height="6" fill="{colours.background}"/></pattern>'
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} {font}>',
        f"<title>{escape(title)}</title>",
        f"<defs>{stripes}</defs>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="{colours.background}"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "middle",
    size: float = 12,
    fill: str | None = None,
    bold: bool = False,
    code: bool = False,
) -> str:
    """A line of text. ``anchor`` says whether ``x`` is its middle, its start or its end."""
    style = "".join(
        [
            f' text-anchor="{anchor}"' if anchor != "start" else "",
            f' font-size="{size:g}"' if size != 12 else "",
            f' fill="{fill}"' if fill else "",
            ' font-weight="600"' if bold else "",
            f' font-family="{escape(CODE_FONT)}"' if code else "",
        ]
    )
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{escape(content)}</text>'


def text_width(content: str, size: float = 12, code: bool = False) -> float:
    """The approximate width of a text in pixels."""
    return len(content) * size * _LETTER["code" if code else "ui"]


def rect(box: Box, fill: str, stroke: str | None = None, attributes: Mapping[str, str] | None = None) -> str:
    """A filled rectangle."""
    more = {**({"stroke": stroke} if stroke else {}), **(attributes or {})}
    written = "".join(f' {name}="{value}"' for name, value in more.items())
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'fill="{fill}"{written}/>'
    )


def line(start: tuple[float, float], end: tuple[float, float], stroke: str, dashed: bool = False) -> str:
    """A straight line, one pixel wide."""
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<path d="M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}" stroke="{stroke}"{dash} fill="none"/>'


def curve(start: tuple[float, float], end: tuple[float, float], stroke: str, width: float = 1.5) -> str:
    """A curve whose ends are horizontal."""
    bend = (end[0] - start[0]) / 2
    return (
        f'<path d="M{start[0]:.1f} {start[1]:.1f}C{start[0] + bend:.1f} {start[1]:.1f} {end[0] - bend:.1f} '
        f'{end[1]:.1f} {end[0]:.1f} {end[1]:.1f}" fill="none" stroke="{stroke}" stroke-width="{width:.1f}"/>'
    )


def legend(fills: Mapping[str, str], x: float, y: float, colours: Palette, stroke: str | None = None) -> Iterator[str]:
    """Squares of these colours in a row, each with its name beside it."""
    for name, fill in fills.items():
        yield rect(Box(x, y, 12, 12), fill, stroke)
        yield text(x + 18, y + 10, name, anchor="start", fill=colours.muted)
        x += text_width(name) + 40


def arrow(start: tuple[float, float], end: tuple[float, float], stroke: str) -> Iterator[str]:
    """A horizontal arrow."""
    step = 5 if end[0] > start[0] else -5
    yield line(start, end, stroke)
    x, y = end
    yield f'<path d="M{x:.1f} {y:.1f}l{-step} -3.5v7z" fill="{stroke}"/>'


def lengths(sizes: Mapping[str, int], longest: float, shortest: float) -> dict[str, float]:
    """Pixels for every dim: in proportion to the sizes, or closer together if the sizes differ too much."""
    positive = [size for size in sizes.values() if size > 0] or [1]
    most, least = max(positive), min(positive)
    power, wanted = 1.0, shortest / longest
    if least / most < wanted:
        power = math.log(wanted) / math.log(least / most)
    return {name: max(2.0, longest * (size / most) ** power) if size else 2.0 for name, size in sizes.items()}
