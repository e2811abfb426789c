"""Pictures of weights: the outline of the whole weight, and the slices on the ranks of a column."""

from __future__ import annotations

from functools import lru_cache
from math import log2, prod
from typing import Any

from workbench.core.layout import Layout, Region
from workbench.ui.number_text import TIMES
from workbench.units import format_bytes

Shape = tuple[int, ...]
_THINNEST_PX = 1.5
_FLATTER = 0.62  # rows are 32 pixels high, columns up to 83 wide


@lru_cache(maxsize=8192)
def held(shape: Shape, layout: Layout, ranks: tuple[int, ...], shade: int, itemsize: int) -> dict[str, Any] | None:
    """The parts of a weight on some ranks, as fractions of its width and height; None if they hold nothing.

    Several ranks in one column make one picture with all their slices. ``note`` is the number of copies, ``itemsize``
    bytes of an element.

    >>> from workbench.core.placement import Placement
    >>> layout = Layout.of(Placement.of("cpu", [0, 1]), "S(0)")
    >>> held((8, 4), layout, (1,), 1, itemsize=4)["text"]
    'rows 4-7 of 8, 64 B'
    """
    present = [rank for rank in ranks if rank in layout.placement]
    if not present:
        return None
    regions: dict[Region, int] = {}
    for position, rank in enumerate(present):
        regions.setdefault(layout.region(shape, rank), position)
    size = max(prod(stop - start for start, stop in region) for region in regions) * itemsize
    if len(present) == 1:
        return {
            "parts": [_part(shape, region, shade) for region in regions],
            "text": f"{region_text(shape, next(iter(regions)))}, {format_bytes(size)}",
            "note": "",
        }
    copies = len(present) // len(regions)
    sliced = f"{len(regions)} slices of {format_bytes(size)}" if len(regions) > 1 else f"all of {shape_text(shape)}"
    return {
        "parts": _parts(shape, regions),
        "text": f"{sliced} on {len(present)} ranks" + (f", {copies} copies" if copies > 1 else ""),
        "note": f"{TIMES}{copies}" if copies > 1 else "",
    }


def _parts(shape: Shape, regions: dict[Region, int]) -> list[dict[str, Any]]:
    """One part per slice in alternating shades; one part in all if slices would be thinner than a line."""
    width, height = picture_size(shape)
    parts = [_part(shape, region, index) for index, region in enumerate(regions)]
    thinnest = min(min(part["w"] * width, part["h"] * height) for part in parts)
    if thinnest >= _THINNEST_PX or len(parts) == 1:
        return parts
    return [_part((), (), 0)]


def _part(shape: Shape, region: Region, shade: int) -> dict[str, Any]:
    """The region as a rectangle: the first dim from top to bottom, the second (of two or more) from left to right."""
    if not shape:
        return {"x": 0.0, "y": 0.0, "w": 1.0, "h": 1.0, "shade": shade}
    top, bottom = (edge / max(shape[0], 1) for edge in region[0])
    left, right = (edge / max(shape[1], 1) for edge in region[1]) if len(shape) > 1 else (0.0, 1.0)
    return {"x": left, "y": top, "w": right - left, "h": bottom - top, "shade": shade}


def region_text(shape: Shape, region: Region) -> str:
    """``"rows 0-127 of 256"``; the whole weight is ``"all of 256 x 64"``."""
    names = ("rows", "columns", *(f"dim {dim}" for dim in range(2, len(shape))))
    parts = [
        f"{name} {start}-{stop - 1} of {size}" if stop > start else f"no {name}"
        for name, (start, stop), size in zip(names, region, shape, strict=False)
        if (start, stop) != (0, size)
    ]
    return ", ".join(parts) or f"all of {shape_text(shape)}"


def shape_text(shape: Shape) -> str:
    """``"256 x 64"``; ``"1"`` for a scalar, empty without a weight."""
    return f" {TIMES} ".join(map(str, shape))


def picture_size(shape: Shape, small: bool = False) -> tuple[int, int]:
    """Width and height in pixels; they grow with the logarithm of the weight's sizes."""
    if len(shape) < 2:
        return (16 if small else 26), 6
    if small:
        return _pixels(shape[1], 22, 0.5), _pixels(shape[0], 18, 0.5)
    return _pixels(shape[1], 44, 1.0), _pixels(shape[0], 24, _FLATTER)


def _pixels(size: int, largest: float, scale: float) -> int:
    return int(min(max(scale * (4 * log2(max(size, 1)) - 6), 6), largest))
