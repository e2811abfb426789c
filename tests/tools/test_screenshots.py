"""Pictures are taken by the browser tests, and only when asked for."""

from __future__ import annotations

import re

from tools.screenshots import ROOT, TESTS, command


def test_arguments_go_to_pytest():
    assert command(["-k", "dark"])[-3:] == [TESTS, "-k", "dark"]


def test_every_picture_of_the_readme_is_taken_by_a_test():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / TESTS).glob("test_*.py"))
    shown = re.findall(r"docs/images/([\w-]+\.png)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown and [name for name in shown if f'"{name}"' not in sources] == []
