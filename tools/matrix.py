"""Run the tests with several versions of Python and torch, and write docs/versions.md.

    make matrix                                              the environment of this checkout, .venv
    make matrix ARGS=".venv ~/envs/p312"                     environments that have what the tests need
    make matrix ARGS="python3.12:2.11.0 python3.13:2.13.0"   interpreters and versions of torch

For the last it makes the environments in out/matrix, 1 to 5 GB each, and keeps them. One environment runs after the
other. A row of the page stays until the same versions are run again. What pytest prints goes to out/matrix.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tools.quote_numbers import quote, quoted

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "matrix"
PAGE = ROOT / "docs" / "versions.md"
_HEAD = "| Python | torch | build | passed | failed | skipped | date |\n|---|---|---|--:|--:|--:|---|\n"
_ASK = "import platform, torch; print(platform.python_version(), *(torch.__version__ + '+').split('+')[:2])"


class Row(NamedTuple):
    """The result of one environment, in the words of the page. ``failed`` counts errors and ended workers too."""

    python: str
    torch: str
    build: str
    passed: str
    failed: str
    skipped: str
    date: str


def rows_of(page: str) -> list[Row]:
    """The rows of the table on the page."""
    lines = quoted(page, "matrix").splitlines()[2:]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def with_row(page: str, row: Row) -> str:
    """The page with a row, in place of that of the same versions."""
    others = [other for other in rows_of(page) if other[:3] != row[:3]]
    rows = sorted([*others, row], key=lambda row: [[int(n) for n in cell.split(".")] for cell in row[:2]])
    return quote(page, "matrix", _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows))


def counts(output: str) -> tuple[str, str, str]:
    """(passed, failed, skipped) from the last line that pytest prints.

    >>> counts("87 failed, 5918 passed, 15 skipped, 2 errors in 610.76s (0:10:10)")
    ('5,918', '89', '15')
    """
    found = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    for number, what in re.findall(r"(\d+) (passed|failed|error|skipped)", output.strip().rpartition("\n")[2]):
        found[what] = int(number)
    passed, failed, errors, skipped = found.values()
    return f"{passed:,}", f"{failed + errors:,}", f"{skipped:,}"


def environment(name: str) -> Path:
    """The folder of an environment; one that is named by its versions is made, unless it is there."""
    python, _, torch = name.partition(":")
    if not torch:
        return Path(name).expanduser()
    folder = OUT / f"{Path(python).name}-torch-{torch}"
    variables = {**os.environ, "PYTHON": python, "TORCH": f"torch=={torch}"}
    subprocess.run(["sh", "tools/install.sh", folder, "dev"], cwd=ROOT, env=variables, check=True)
    return folder


def run(folder: Path, markers: str) -> Row:
    """Run the tests that the markers choose in an environment."""
    python = folder / "bin" / "python"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    asked = subprocess.run([python, "-c", _ASK], cwd=ROOT, env=variables, check=True, capture_output=True, text=True)
    version, torch, build = (*asked.stdout.split(), "PyPI")[:3]
    log = OUT / f"python-{version}-torch-{torch}-{build}.log"
    own = "--ignore=tests/tools/test_matrix.py"  # it wants rows that this run makes
    options = ["-q", "-rfE", "--tb=short", "-n", "auto", "--dist", "loadfile", own]
    command = [str(python), "-m", "pytest", *options, "-m", markers]
    OUT.mkdir(parents=True, exist_ok=True)
    print(f"==> Python {version}, torch {torch}+{build}: {log.relative_to(ROOT)}", flush=True)
    with log.open("w") as file:
        subprocess.run(command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT, check=False)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return Row(version, torch, build, *counts(log.read_text(encoding="utf-8")), today)


def main() -> int:
    """Write a row for each environment; 1 if a test failed."""
    parser = argparse.ArgumentParser(
        prog="make matrix", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("environments", nargs="*", default=[".venv"], help="folders, or interpreter:version of torch")
    parser.add_argument("-m", dest="markers", default="", help="the tests, as pytest takes them")
    asked = parser.parse_args()
    rows = []
    for name in asked.environments:
        rows.append(run(environment(name), asked.markers))
        print("    {3} passed, {4} failed, {5} skipped".format(*rows[-1]))
        PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), rows[-1]), encoding="utf-8")
    return int(any(row.failed != "0" or row.passed == "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
