"""Names beside points: each on the first free side, or left out. No name covers a point or another name, nor lies on a
line unless all sides do."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.ui.pictures.svg import text_width

Point = tuple[float, float]
Box = tuple[float, float, float, float]
_SIZE = 12


def place_labels(
    names: Sequence[tuple[str, Point]],
    points: Sequence[Point],
    within: tuple[float, float],
    ring: float = 6.0,
    lines: Sequence[Box] = (),
) -> list[tuple[float, float, str, str]]:
    """(x, y, anchor, name) of the names that have room; earlier names get room first. Anchors: "middle", "", "end".

    Args:
        names: the names with their points, the important ones first.
        points: the points that no name may cover.
        within: left and right end of the space for names.
        ring: pixels around a point that stay free.
        lines: x and y of two opposite corners of what a name covers only where it has no other place: lines, words.
    """
    beside = ring + 3
    crossed = [(min(x, u) - 0.5, min(y, v) - 0.5, max(x, u) + 0.5, max(y, v) + 0.5) for x, y, u, v in lines]
    taken = [(x - ring, y - ring, x + ring, y + ring) for x, y in points]
    found = []
    for name, (x, y) in names:
        width = text_width(name, _SIZE) + 2
        centre = min(max(x, within[0] + width / 2), within[1] - width / 2)
        free = []
        above, below = y - beside, y + ring + 13
        for at, base, anchor, left in (
            (centre, above, "middle", centre - width / 2),
            (centre, below, "middle", centre - width / 2),
            (x + beside, y + 4, "", x + beside),
            (x - beside, y + 4, "end", x - beside - width),
            *((x + side * ring, base, "end", x + side * ring - width) for side in (1, -1) for base in (above, below)),
            *((x - side * ring, base, "", x - side * ring) for side in (1, -1) for base in (above, below)),
        ):
            box = (left, base - 10, left + width, base + 3)
            if within[0] <= left and box[2] <= within[1] and not any(_shared(box, other) for other in taken):
                free.append(((at, base, anchor, name), box))
        if free:
            label, box = min(free, key=lambda place: sum(_shared(place[1], line) for line in crossed))
            found.append(label)
            taken.append(box)
    return found


def _shared(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
