"""The gallery: models of other people. They run among the slow tests; the first notebook always does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.cells import GALLERY, execute, read, stored_size
from tools.draw_gallery import IMAGES, shown_without_kernel

NOTEBOOKS = sorted(GALLERY.glob("*.ipynb"))
PAGE = Path(__file__).parents[2] / "docs" / "gallery.md"


def test_every_notebook_is_on_the_page_with_its_picture() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        assert f"../notebooks/gallery/{path.name}" in text and f"images/gallery/{path.stem}.png" in text
    assert {path.stem for path in IMAGES.glob("*.png")} == {path.stem for path in NOTEBOOKS}


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_runs_by_itself_and_shows_its_picture_without_a_kernel(path: Path) -> None:
    notebook: Any = execute(read(path), GALLERY)
    assert "<svg" in shown_without_kernel(notebook)
    assert stored_size(notebook) < 500_000
