"""Notebooks as tests see them: read, run, and what a cell has shown.

Jupyter's libraries take two seconds to load, so they are loaded when a notebook is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.timeouts import PAGE_TIMEOUT_S

FOLDER = Path(__file__).parents[2] / "notebooks"
SEEDS = FOLDER / "seeds"
GALLERY = FOLDER / "gallery"


def read(path: Path) -> Any:
    """A notebook with its cells."""
    import nbformat

    return nbformat.read(path, as_version=4)


def execute(notebook: Any, folder: Path = FOLDER) -> Any:
    """Run all cells in a kernel of their own; the notebook, with what they have shown."""
    from nbclient import NotebookClient

    where = {"metadata": {"path": str(folder)}}
    limits: dict[str, Any] = {"timeout": PAGE_TIMEOUT_S}
    limits["iopub_timeout"] = PAGE_TIMEOUT_S  # else a late output of a cell is left out
    try:
        NotebookClient(notebook, **limits, store_widget_state=False, resources=where).execute()
    except Exception as error:
        error.add_note(f"What the cells have printed:\n{printed(notebook)}")
        raise
    return notebook


def printed(notebook: Any) -> str:
    """What all cells have printed, in one text."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return "".join(output.text for output in outputs if output.output_type == "stream")


def joined(paths: Sequence[Path], shorter: Sequence[tuple[str, str]]) -> Any:
    """One notebook of the code of all of them, that starts its engines once; patterns say what is replaced in it."""
    import nbformat

    cells = [cell for path in paths for cell in read(path).cells if cell.cell_type == "code"]
    starts = ("%load_ext", "%workbench start")
    setup = [next(cell for cell in cells if cell.source.startswith(start)) for start in starts]
    rest = [cell for cell in cells if not cell.source.startswith((*starts, "%workbench stop"))]
    notebook = nbformat.v4.new_notebook(metadata=read(paths[0]).metadata)
    sources = [cell.source for cell in [*setup, *rest]]
    for pattern, replacement in shorter:
        sources = [re.sub(pattern, replacement, source) for source in sources]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in [*sources, "%workbench stop"]]
    return notebook


def stored_size(notebook: Any) -> int:
    """Characters of the file."""
    import nbformat

    return len(nbformat.writes(notebook))


def outputs(notebook: Any, source: str) -> list[Any]:
    """Outputs of the one code cell that contains ``source``."""
    found = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    assert len(found) == 1, f"{source!r} is in {len(found)} cells"
    return list(found[0].outputs)


def text_of(notebook: Any, source: str) -> str:
    """All text that a cell printed or displayed."""
    return "\n".join(map(_text, outputs(notebook, source)))


def texts_of(notebook: Any, source: str) -> list[str]:
    """What each of the cells that contain ``source`` printed and displayed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    assert cells, f"no cell has {source!r}"
    return ["\n".join(map(_text, cell.outputs)) for cell in cells]


def _text(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))
