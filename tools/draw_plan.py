"""``python -m tools.draw_plan``: draw the picture of docs/boxing.md again."""

from __future__ import annotations

from pathlib import Path

from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.ui.pictures.boxing import plan_picture

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "boxing-plan.svg"


def picture() -> str:
    """Rows become columns on four ranks, seven of one and ten of the other: nothing divides evenly."""
    ranks = Placement.of("cpu", [0, 1, 2, 3])
    return plan_picture(plan_boxing(Layout.of(ranks, "S(0)"), Layout.of(ranks, "S(1)"), (7, 10), itemsize=4))


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(f"wrote {PICTURE}")
