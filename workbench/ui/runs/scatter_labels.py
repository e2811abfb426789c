"""Names beside points: on the first free side, never over a point or another name, and left out where none is free."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.ui.pictures.drawing import text_width

Point = tuple[float, float]
_SIZE = 12


def place_labels(
    names: Sequence[tuple[str, Point]], points: Sequence[Point], within: tuple[float, float], ring: float = 6.0
) -> list[tuple[float, float, str, str]]:
    """(x, y, anchor, name) of the names that have room, the first ones first; anchors are "middle", "" and "end".

    Args:
        names: with their points, the important ones first.
        points: all that must not be covered.
        within: left and right end of what can be written on.
        ring: pixels around a point that stay free.
    """
    beside = ring + 3
    taken = [(x - ring, y - ring, x + ring, y + ring) for x, y in points]
    found = []
    for name, (x, y) in names:
        width = text_width(name, _SIZE) + 2
        sides = (
            (x - width / 2, y - beside, "middle", x),
            (x - width / 2, y + ring + 13, "middle", x),
            (x + beside, y + 4, "", x + beside),
            (x - beside - width, y + 4, "end", x - beside),
        )
        for left, base, anchor, at in sides:
            box = (left, base - 10, left + width, base + 3)
            if box[0] < within[0] or box[2] > within[1] or any(_overlap(box, other) for other in taken):
                continue
            taken.append(box)
            found.append((at, base, anchor, name))
            break
    return found


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


__all__ = ["place_labels"]
