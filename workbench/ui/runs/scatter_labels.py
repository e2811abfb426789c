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
    found = []
    for (name, (x, y)), side in zip(names, free_sides(names, points, within, ring), strict=True):
        if side is not None:
            at = {"right": x + beside, "left": x - beside}.get(side, x)
            base = {"above": y - beside, "below": y + ring + 13}.get(side, y + 4)
            found.append((at, base, {"right": "", "left": "end"}.get(side, "middle"), name))
    return found


def free_sides(
    names: Sequence[tuple[str, Point]], points: Sequence[Point], within: tuple[float, float], ring: float = 6.0
) -> list[str | None]:
    """``"above"``, ``"below"``, ``"right"`` or ``"left"`` for every name, None for those that have no room. Pixels, y
    downwards; arguments as for ``place_labels``.
    """
    beside = ring + 3
    taken = [(x - ring, y - ring, x + ring, y + ring) for x, y in points]
    found: list[str | None] = []
    for name, (x, y) in names:
        width = text_width(name, _SIZE) + 2
        corners = {  # left end and base line
            "above": (x - width / 2, y - beside),
            "below": (x - width / 2, y + ring + 13),
            "right": (x + beside, y + 4),
            "left": (x - beside - width, y + 4),
        }
        boxes = {side: (left, base - 10, left + width, base + 3) for side, (left, base) in corners.items()}
        free = (
            side
            for side, box in boxes.items()
            if within[0] <= box[0] and box[2] <= within[1] and not any(_overlap(box, other) for other in taken)
        )
        found.append(next(free, None))
        taken += [boxes[side] for side in found[-1:] if side is not None]
    return found


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


__all__ = ["free_sides", "place_labels"]
