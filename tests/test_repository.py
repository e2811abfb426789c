"""What is true of every file in the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import workbench

ROOT = Path(__file__).parent.parent

HOMES = r"/(?:root|home/[a-z]\w*|Users/[A-Z]\w*)/"
MACHINE_PATHS = re.compile(rf"(?<![\w.])(?:{HOMES}|{re.escape(str(ROOT))}\b)")
"""Somebody's home, and where this checkout happens to lie."""


def tracked_files() -> list[Path]:
    """Files that git knows; there are none to ask for where the tests run from an archive."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def text_of(path: Path) -> str:
    """The file's text; empty for pictures and other binary files, and for files deleted but not committed yet."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError):
        return ""


def machine_paths(text: str) -> list[str]:
    return [line.strip()[:120] for line in text.splitlines() if MACHINE_PATHS.search(line)]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    found = {str(path.relative_to(ROOT)): lines for path in tracked_files() if (lines := machine_paths(text_of(path)))}
    assert not found


def test_no_file_is_very_long() -> None:
    """Small rooms: a source file over 400 lines should have been two."""
    long = {
        str(path.relative_to(ROOT)): num_lines
        for path in tracked_files()
        if path.suffix in {".py", ".js", ".css"} and (num_lines := len(text_of(path).splitlines())) > 400
    }
    assert not long


OWN_LIMITS = re.compile(
    r"wait_for_timeout\(|\b(?:timeout|timeout_s)\s*[=:]\s*(?:float\s*=\s*)?[\d.]|time\.sleep\([1-9]"
)
"""A wait that goes by the clock and not by what the page says, or is less patient than the others."""


def test_browser_tests_wait_for_the_page_and_not_for_the_clock() -> None:
    """What takes a second takes a minute where others have the cores; tests/timeouts.py has the only limit."""
    found = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "tests" / "browser").glob("*.py")
        if (lines := [line.strip() for line in text_of(path).splitlines() if OWN_LIMITS.search(line)])
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "page.wait_for_timeout(500)",
        "wait_for(timeout=10_000)",
        "timeout=5 * SECONDS",
        "timeout_s: float = 90",
        "time.sleep(2)",
    ],
)
def test_a_limit_of_its_own_is_found(line: str) -> None:
    assert OWN_LIMITS.search(line) and not OWN_LIMITS.search("timeout=PAGE_TIMEOUT_S")


def test_the_changelog_tells_of_this_version() -> None:
    told = re.findall(r"^## \[(.+)\] - \d{4}-\d\d-\d\d$", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert told[0] == workbench.__version__


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT, *(f"/{home}/x" for home in ("root", "home/ann", "Users/Ann"))]
)
def test_a_path_of_a_machine_is_found(path: Path | str) -> None:
    assert machine_paths(f'open("{path}")') == [f'open("{path}")']


@pytest.mark.parametrize(
    "text", ["docs/home/x", "/usr/bin/python", "file:///path", "/tmp/x", "/homework/x", f"{ROOT}s/x"]
)
def test_other_paths_pass(text: str) -> None:
    assert not machine_paths(text)
