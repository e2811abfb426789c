"""Run the notebooks of the gallery, and draw what their cells with the tag ``picture`` show without a kernel.

    python -m tools.draw_gallery            # all of them, into docs/images/gallery
    python -m tools.draw_gallery resnet     # one

It needs a Chromium, as the browser tests do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.browser.server import CHROMIUM_OPTIONS, find_chromium
from tests.notebooks.cells import GALLERY, execute, read

IMAGES = Path(__file__).parents[1] / "docs" / "images" / "gallery"
TAG = "picture"
WIDTH = 1180
STYLE = "margin: 0; padding: 12px; font-family: sans-serif"


def shown_without_kernel(notebook: Any) -> str:
    """The last HTML that the tagged cell has shown.

    Raises:
        ValueError: not one cell has the tag, or it shows no HTML.
    """
    tagged = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", ())]
    found = [
        output.data["text/html"] for cell in tagged for output in cell.outputs if "text/html" in output.get("data", {})
    ]
    if len(tagged) != 1 or not found:
        raise ValueError(f"{len(tagged)} cells have the tag {TAG!r}, and they show {len(found)} pieces of HTML.")
    return str(found[-1])


def draw(pages: Mapping[str, str], folder: Path) -> None:
    """A picture of each page (name -> HTML), cut to its size."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=CHROMIUM_OPTIONS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 800})
        for name, html in pages.items():
            page.set_content(f"<!doctype html><body style='{STYLE}'>{html}</body>")
            page.locator("body").screenshot(path=folder / f"{name}.png")
        browser.close()


def main(names: Sequence[str]) -> int:
    """Draw the named notebooks, or all."""
    paths = [path for path in sorted(GALLERY.glob("*.ipynb")) if not names or path.stem in names]
    draw({path.stem: shown_without_kernel(execute(read(path), GALLERY)) for path in paths}, IMAGES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
