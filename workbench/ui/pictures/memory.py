"""Draws memory over one step by kind, a row for each rank. A pure function: curves -> SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workbench.core.profile import MEMORY_KINDS, MemoryCurve, Profile
from workbench.theme import Palette, palette
from workbench.ui.pictures.svg import Box, Picture, document, legend, line, rect, text
from workbench.units import format_bytes, format_seconds

MAX_RANKS = 16
_LEFT, _TOP, _WIDTH, _ROW, _GAP = 150.0, 48.0, 560.0, 84.0, 14.0


def draw_memory(profile: Profile, *, theme: str = "light") -> Picture:
    """A picture of the memory that each rank holds over one step, by kind: parameters, gradients, optimizer state,
    activations, and on a GPU what else its allocator holds.

    Args:
        profile: of ``wb.debug.profile``, with at least 3 warm-up steps and at most 16 ranks.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        ValueError: something else than a profile, or one in which memory was not measured, or of more than 16 ranks.

    ``wb.draw.memory(profile).save("memory.svg")`` writes it to a file.
    """
    if not isinstance(profile, Profile):
        raise ValueError(
            f"wb.draw.memory: a {type(profile).__name__} is no profile. Give that of wb.debug.profile, or "
            "of %workbench profile."
        )
    curves = profile.memory
    if not 1 <= len(curves) <= MAX_RANKS:
        raise ValueError(
            f"wb.draw.memory: a profile with the memory of {len(curves)} ranks; a picture has room for 1 to "
            f"{MAX_RANKS}. Memory is measured in a warm-up step, if there are at least 3: wb.debug.profile(warmup=3)."
        )
    largest = max(curve.peak_bytes for curve in curves)
    description = f"memory over a step, at most {format_bytes(largest)} on a rank"
    colours, kinds = palette(theme), [kind for kind in MEMORY_KINDS if any(kind in c.size_bytes for c in curves)]
    parts = [text(16, 28, description, anchor="start", bold=True)]
    for index, curve in enumerate(curves):
        parts += _row(curve, _TOP + index * (_ROW + _GAP), max(largest, 1), colours)
    bottom = _TOP + len(curves) * (_ROW + _GAP)
    fills = {"other, of the allocator" if kind == "other" else kind: _colour(kind, colours) for kind in kinds}
    parts += legend(fills, _LEFT, bottom + 10, colours, colours.line)
    return Picture(document((_LEFT + _WIDTH + 24, bottom + 36), description, colours, parts), description)


def _row(curve: MemoryCurve, top: float, largest: int, colours: Palette) -> Iterator[str]:
    yield text(16, top + _ROW / 2 - 4, f"rank {curve.rank}", anchor="start", bold=True)
    yield text(16, top + _ROW / 2 + 13, f"peak {format_bytes(curve.peak_bytes)}", anchor="start", fill=colours.muted)
    yield rect(Box(_LEFT, top, _WIDTH, _ROW), colours.sunk)
    length = curve.time_s[-1] or 1.0
    xs = [_LEFT + _WIDTH * time_s / length for time_s in curve.time_s]
    below = [0] * len(xs)
    for kind in MEMORY_KINDS:
        if kind in curve.size_bytes:
            above = [low + size for low, size in zip(below, curve.size_bytes[kind], strict=True)]
            yield _area(xs, below, above, top, largest, _colour(kind, colours), kind)
            below = above
    yield line((_LEFT, top + _ROW), (_LEFT + _WIDTH, top + _ROW), colours.strong_line)
    yield text(_LEFT + _WIDTH, top + _ROW + 11, format_seconds(length), anchor="end", size=10, fill=colours.muted)


def _area(
    xs: Sequence[float], below: Sequence[int], above: Sequence[int], top: float, largest: int, fill: str, kind: str
) -> str:
    """The area of one kind. A size holds until the next sample."""
    tops, bottoms = ([top + _ROW * (1 - size / largest) for size in sizes] for sizes in (above, below))
    places = [*_stairs(xs, tops), *reversed(list(_stairs(xs, bottoms)))]
    return f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}Z" fill="{fill}" class="{kind}"/>'


def _stairs(xs: Sequence[float], ys: Sequence[float]) -> Iterator[tuple[float, float]]:
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if i:
            yield x, ys[i - 1]
        yield x, y


def _colour(kind: str, colours: Palette) -> str:
    return colours.memory.get(kind, colours.idle)
