"""The check of notebooks sees into cells under ``%%global``; ruff alone does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import check_notebooks


def notebook_with(path: Path, *cells: str) -> Path:
    bare = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    made = [{**bare, "id": f"cell-{number}", "source": cell} for number, cell in enumerate(cells)]
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")
    return path


def test_clean_cells_pass(tmp_path: Path) -> None:
    sources = [f"{magic}\nx = 1\nx" for magic in ("%%global", "%%global --ranks 0,2", "# %%global")]
    assert check_notebooks.check([notebook_with(tmp_path / "a.ipynb", "%load_ext workbench", *sources)]) == 0


def test_every_mistake_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    codes = {"unused": "import os", "layout": "x=1", "undefined": "undefined_name"}
    magics = {"magic": "%%global", "spelling": "# %%global", "plain": "# plain"}
    notebooks = [
        notebook_with(tmp_path / f"{name}-under-{kind}.ipynb", f"{magic}\n{code}")
        for name, code in codes.items()
        for kind, magic in magics.items()
    ]
    assert check_notebooks.check(notebooks) == 1
    told = "".join(capfd.readouterr())
    assert [path.name for path in notebooks if path.name not in told] == []


def test_other_magics_are_unchanged() -> None:
    cell = {"cell_type": "code", "source": ["%%bash\n", "ls"]}
    assert check_notebooks.as_comments({"cells": [cell]})["cells"][0]["source"] == ["%%bash\n", "ls"]
