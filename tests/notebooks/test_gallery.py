"""The gallery: models of other people, two in one kernel at a small size, each by itself among the slow tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.cells import GALLERY, execute, joined, read, stored_size, text_of
from tools.draw_gallery import IMAGES, shown_without_kernel

NOTEBOOKS = sorted(GALLERY.glob("*.ipynb"))
PAGE = Path(__file__).parents[2] / "docs" / "gallery.md"
QUICK = ("lora.ipynb", "own-loop.ipynb")
"""Of what the gallery shows: a comparison, a panel, a report of memory, and a loop of one's own that is followed."""
_SHORTER = [
    (r"steps=\d+", "steps=4"),
    (r"width=16", "width=4"),
    (r"batch_size=\d+", "batch_size=16"),
    (r"LENGTH = 64", "LENGTH = 16"),
    (r"range\(150\)", "range(4)"),
    (r"step % 50 == 49", "step % 2 == 1"),
    (r"last_step == 150", "last_step == 4"),
    (r"> 0\.8", "> 0"),
    (r"range\(60\)", "range(2)"),
    (r"range\(40\)", "range(2)"),
]
"""What is replaced for the quick run: fewer steps, smaller layers and batches, and what is expected of them."""


def test_every_notebook_is_on_the_page_with_its_picture() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        assert f"../notebooks/gallery/{path.name}" in text and f"images/gallery/{path.stem}.png" in text
    assert {path.stem for path in IMAGES.glob("*.png")} == {path.stem for path in NOTEBOOKS}


@pytest.mark.engines
def test_two_run_in_one_kernel() -> None:
    """They assert that their runs equal one device."""
    notebook = execute(joined([GALLERY / name for name in QUICK], _SHORTER), GALLERY)
    assert "of the other points are right" in text_of(notebook, "wb.evaluate(")
    assert "the frozen weights are as they were: True" in text_of(notebook, "wb.debug.memory_report(")


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_runs_by_itself_and_shows_its_picture_without_a_kernel(path: Path) -> None:
    notebook: Any = execute(read(path), GALLERY)
    assert "<svg" in shown_without_kernel(notebook)
    assert stored_size(notebook) < 500_000
