"""Names beside points: each on the first free side, or left out. No name covers a point or another name."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.ui.pictures.svg import text_width

Point = tuple[float, float]
_SIZE = 12


def place_labels(
    names: Sequence[tuple[str, Point]], points: Sequence[Point], within: tuple[float, float], ring: float = 6.0
) -> list[tuple[float, float, str, str]]:
    """(x, y, anchor, name) of the names that have room; earlier names get room first. Anchors: "middle", "", "end".

    Args:
        names: the names with their points, the important ones first.
        points: the points that no name may cover.
        within: left and right end of the space for names.
        ring: pixels around a point that stay free.
    """
    beside = ring + 3
    taken = [(x - ring, y - ring, x + ring, y + ring) for x, y in points]
    found = []
    for name, (x, y) in names:
        width = text_width(name, _SIZE) + 2
        for at, base, anchor, left in (
            (x, y - beside, "middle", x - width / 2),
            (x, y + ring + 13, "middle", x - width / 2),
            (x + beside, y + 4, "", x + beside),
            (x - beside, y + 4, "end", x - beside - width),
        ):
            box = (left, base - 10, left + width, base + 3)
            if within[0] <= left and box[2] <= within[1] and not any(_overlap(box, other) for other in taken):
                found.append((at, base, anchor, name))
                taken.append(box)
                break
    return found


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
