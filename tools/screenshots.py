"""``python -m tools.screenshots``: take the pictures of the panel in docs/images again.

The browser tests look at every state that is pictured, so they take the pictures, too, when they are asked to.
Arguments go to pytest: ``python -m tools.screenshots -k sixty_four`` takes one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = "tests/browser"


def command(arguments: Sequence[str]) -> list[str]:
    """Without arguments all browser tests."""
    return [sys.executable, "-m", "pytest", "-q", "-m", "browser", TESTS, *arguments]


def main(arguments: Sequence[str]) -> int:
    """Run the tests; a missing browser is a failure, because there would be no pictures."""
    wanted = {"WORKBENCH_SCREENSHOTS": "1", "WORKBENCH_REQUIRE_BROWSER": "1"}
    return subprocess.run(command(arguments), cwd=ROOT, env=os.environ | wanted, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
