"""Lint and format-check the notebooks, the cells under ``%%global`` too.

Ruff has a fixed list of cell magics that hold Python and skips all other cells. This check gives it copies of the
notebooks in which ``%%global`` is spelled as the comment ``# %%global``, which the session understands as well.

    python -m tools.check_notebooks
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HOME = ROOT / "notebooks"
_MAGIC = re.compile(r"^%%global\b")


def as_comments(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the magic of every ``%%global`` cell turned into a comment; line numbers stay.

    >>> as_comments({"cells": [{"cell_type": "code", "source": "%%global --ranks 0\\nx = 1"}]})["cells"][0]["source"]
    ['# %%global --ranks 0\\n', 'x = 1']
    """
    for cell in notebook["cells"]:
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = _MAGIC.sub("# %%global", source)
        cell["source"] = source.splitlines(keepends=True)
    return notebook


def check(notebooks: list[Path]) -> int:
    """Run both of ruff's checks on the notebooks; the exit code is 0 if all are clean."""
    with tempfile.TemporaryDirectory() as folder:
        # Rules for notebooks go by this folder's name.
        copies = Path(folder) / "notebooks"
        copies.mkdir()
        for notebook in notebooks:
            changed = as_comments(json.loads(notebook.read_text(encoding="utf-8")))
            copy = copies / (notebook.relative_to(HOME) if notebook.is_relative_to(HOME) else notebook.name)
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(json.dumps(changed), encoding="utf-8")
        commands = (["check"], ["format", "--check", "--diff"])
        return max(_ruff(arguments, Path(folder)) for arguments in commands)


def _ruff(arguments: list[str], folder: Path) -> int:
    command = [
        sys.executable,
        "-m",
        "ruff",
        *arguments,
        "--quiet",
        "--no-cache",
        "--config",
        str(ROOT / "pyproject.toml"),
    ]
    return subprocess.run([*command, "notebooks"], cwd=folder, check=False).returncode


def main() -> int:
    """Check the repository's notebooks; finding none is a failure, too."""
    notebooks = sorted(HOME.rglob("*.ipynb"))
    if not notebooks:
        print("notebooks: none found")
        return 1
    code = check(notebooks)
    print(f"notebooks: {len(notebooks)} checked, {'clean' if code == 0 else 'see above'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
