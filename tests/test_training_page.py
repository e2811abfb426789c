"""The script of docs/training.md runs unchanged, on four processes."""

from __future__ import annotations

import re
import tempfile
import warnings
from pathlib import Path

import pytest

from tests.processes import run_processes
from workbench.tensors.dispatch.dispatcher import FallbackWarning

PAGE = Path(__file__).parents[1] / "docs" / "training.md"


def run_the_page(folder: str) -> list[float]:
    tempfile.tempdir = folder
    warnings.simplefilter("ignore", FallbackWarning)
    script = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    names: dict = {}
    exec(compile(script, str(PAGE), "exec"), names)
    assert len(names["loader"]) == 4
    return [float(loss.full_tensor()) for loss in names["losses"]]


@pytest.mark.procs
def test_the_script_of_the_page_runs(tmp_path):
    by_rank = run_processes(run_the_page, 4, str(tmp_path))
    assert all(losses == by_rank[0] for losses in by_rank)
    assert len(by_rank[0]) == 4 and by_rank[0][-1] < by_rank[0][0]
