"""The examples of the README run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import workbench as wb
from tests.patience import PROGRAM_PATIENCE_S

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def block_with(text: str) -> str:
    (found,) = (block for block in BLOCKS if text in block)
    return found


@pytest.mark.procs
def test_the_script_runs_under_torchrun(tmp_path: Path) -> None:
    """As it stands, and once more in the same world with the last layer on another rank: both have the loss there."""
    script = tmp_path / "script.py"
    text = block_with("wb.init()")
    assert "fc*: data; head: model" in text
    in_stages = text.replace("fc*: data; head: model", "fc*: data; head: data@1").replace("wb.init()", "")
    script.write_text(f"{text}\n{in_stages}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher += ["--redirects=1", f"--log-dir={tmp_path / 'logs'}"]  # else two ranks may write into one line
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launcher, str(script)],
        capture_output=True, text=True, env=environment, timeout=PROGRAM_PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = sorted(file.read_text().splitlines() for file in (tmp_path / "logs").rglob("stdout.log"))
    losses = [[line.split()[1] for line in lines] for lines in printed]
    assert [[line.split()[0] for line in lines] for lines in printed] == [["0", "0"], ["1", "1"]]
    assert losses[0] == losses[1]


@pytest.mark.engines
def test_the_cell_and_the_comparison_run() -> None:
    namespace: dict[str, object] = {}
    with wb.Session(engines=2) as session:
        said = session.run(block_with("%%global\neveryone").removeprefix("%%global\n"))
        exec(f"from torch.nn import functional as F\nimport workbench as wb\n{imports_of_the_script()}", namespace)
        exec(block_with("wb.compare("), namespace)
    assert "rank 0 holds (2, 8) of (4, 8)" in said.text
    assert "rank 1 holds (2, 8) of (4, 8)" in said.text
    assert namespace["result"].all_equal


def imports_of_the_script() -> str:
    return "\n".join(line for line in block_with("wb.init()").splitlines() if line.startswith("from workbench"))


def test_the_comment_spelling_is_the_one_that_is_read() -> None:
    from workbench.session.magic import read_comment_spelling

    lines = block_with("# %%global").splitlines(keepends=True)
    assert read_comment_spelling(lines)[0] == "%%global --ranks 0\n"


@pytest.mark.parametrize("name", re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text("utf-8")))
def test_links_lead_somewhere(name: str) -> None:
    assert (ROOT / name).exists()


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"(?:`|    )make ([a-z-]+)", (ROOT / "README.md").read_text("utf-8"))))
)
def test_make_has_the_targets(command: str) -> None:
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
