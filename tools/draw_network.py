"""``python -m tools.draw_network``: draw the picture of docs/flow.md again."""

from __future__ import annotations

from pathlib import Path

import workbench as wb
from workbench.testing import run_ranks

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "mixed-network.svg"


def picture() -> str:
    """Two layers on two ranks, the first one data parallel, the second one model parallel."""

    def draw() -> str:
        ranks = wb.placement("cpu", ranks=[0, 1])
        x = wb.randn(4, 5, placement=ranks, sbp="S(0)")
        w0 = wb.randn(5, 8, placement=ranks, sbp="B").requires_grad_()
        w1 = wb.randn(8, 6, placement=ranks, sbp="S(1)").requires_grad_()
        h = x @ w0
        gathered = h.to_global(sbp="B")
        svg: str = wb.draw_network((x, w0, h), (gathered, w1, gathered @ w1)).svg
        return svg

    drawn: str = run_ranks(draw)[0]
    return drawn


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"wrote {PICTURE}")
