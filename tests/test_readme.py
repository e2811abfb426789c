"""The example of the README runs unchanged."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.timeouts import PROGRAM_TIMEOUT_S
from tests.warm import executable

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
    launcher = [executable(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher += ["--redirects=1", f"--log-dir={tmp_path / 'logs'}"]  # else two ranks may write into one line
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launcher, str(script)],
        capture_output=True, text=True, env=environment, timeout=PROGRAM_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = sorted(file.read_text().splitlines() for file in (tmp_path / "logs").rglob("stdout.log"))
    losses = [[line.split()[1] for line in lines] for lines in printed]
    assert [[line.split()[0] for line in lines] for lines in printed] == [["0", "0"], ["1", "1"]]
    assert losses[0] == losses[1]


def test_the_comment_spelling_is_the_one_that_is_read() -> None:
    from workbench.session.magic import read_comment_spelling

    (spelling,) = re.findall(r"`(# %%global[^`]*)`", (ROOT / "docs" / "guides" / "install.md").read_text("utf-8"))
    assert read_comment_spelling([f"{spelling}\n", "x = 1\n"])[0] == "%%global --ranks 0\n"


@pytest.mark.parametrize("name", re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text("utf-8")))
def test_links_lead_somewhere(name: str) -> None:
    assert (ROOT / name).exists()


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"(?:`|    )make ([a-z-]+)", (ROOT / "README.md").read_text("utf-8"))))
)
def test_make_has_the_targets(command: str) -> None:
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
