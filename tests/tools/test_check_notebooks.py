"""The check of notebooks sees into cells under ``%%global``; ruff alone does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_notebooks


def notebook_with(tmp_path: Path, *cells: str) -> Path:
    import nbformat  # takes two seconds to load

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path = tmp_path / "a.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.mark.parametrize("magic", ["%%global", "%%global --ranks 0,2", "# %%global"])
def test_a_clean_cell_passes(tmp_path: Path, magic: str) -> None:
    assert check_notebooks.check([notebook_with(tmp_path, "%load_ext workbench", f"{magic}\nx = 1\nx")]) == 0


@pytest.mark.parametrize("code", ["import os", "x=1", "undefined_name"])
@pytest.mark.parametrize("magic", ["%%global", "# %%global", "# plain"])
def test_a_mistake_is_found(tmp_path: Path, magic: str, code: str) -> None:
    assert check_notebooks.check([notebook_with(tmp_path, f"{magic}\n{code}")]) == 1


def test_other_magics_are_unchanged() -> None:
    cell = {"cell_type": "code", "source": ["%%bash\n", "ls"]}
    assert check_notebooks.as_comments({"cells": [cell]})["cells"][0]["source"] == ["%%bash\n", "ls"]
